"""The proxy that fails on purpose, in front of a real apiserver."""

import http.client
import json
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest

from e2e.cluster.control_plane import ControlPlane
from e2e.support.kubectl import Kubectl
from e2e.support.proxy import FaultProxy

MAPS = "/api/v1/namespaces/default/configmaps"
BROKEN = r"without response|reset"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"


class Client:
    """A client that goes through the proxy and never tries again."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def open(self, path: str, body: object = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, headers=self._headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return bytes(answer.read())

    def put(self, name: str, path: str = MAPS) -> None:
        self.open(path, {"metadata": {"name": name}})


@pytest.fixture(scope="module")
def token(direct: Kubectl) -> str:
    """A token that may do everything, as the proxy passes tokens on and knows no client certificates."""
    direct.run("create", "serviceaccount", "tester")
    binding = ("--clusterrole=cluster-admin", "--serviceaccount=default:tester")
    direct.run("create", "clusterrolebinding", "tester", *binding)
    return direct.run("create", "token", "tester").strip()


@pytest.fixture
def proxy(apiserver: ControlPlane) -> Iterator[FaultProxy]:
    with FaultProxy(apiserver.url, apiserver.authority.certificate) as made:
        yield made


@pytest.fixture
def through(proxy: FaultProxy, token: str) -> Client:
    return Client(proxy.url, token)


def names(direct: Kubectl) -> set[str]:
    return {each["metadata"]["name"] for each in direct.list_all("configmaps", "default")}


def test_a_write_that_fails_before_never_arrives(proxy: FaultProxy, through: Client, direct: Kubectl) -> None:
    killed = threading.Event()
    proxy.at_write(2, "before", killed.set)
    through.put("before-1")
    with pytest.raises(OSError, match=BROKEN):
        through.put("before-2")
    assert killed.is_set()
    through.put("before-3")
    assert {"before-1", "before-3"} <= names(direct)
    assert "before-2" not in names(direct)


def test_a_write_that_fails_after_has_arrived(proxy: FaultProxy, through: Client, direct: Kubectl) -> None:
    arrived: list[bool] = []
    proxy.at_write(1, "after", lambda: arrived.append("after-1" in names(direct)))
    with pytest.raises(OSError, match=BROKEN):
        through.put("after-1")
    assert arrived == [True]


def test_reads_and_renewals_of_leases_are_no_writes(proxy: FaultProxy, through: Client) -> None:
    through.open(MAPS)
    through.put("leader", LEASES)
    through.put("counted")
    assert [(each.method, each.write) for each in proxy.seen()] == [("GET", 0), ("POST", 0), ("POST", 1)]
    proxy.forget()
    assert proxy.writes() == []


def test_a_silent_watch_says_nothing_more(proxy: FaultProxy, through: Client, direct: Kubectl) -> None:
    version = json.loads(through.open(MAPS))["metadata"]["resourceVersion"]
    heard: list[bytes] = []

    def follow() -> None:
        try:
            heard.append(through.open(f"{MAPS}?watch=true&resourceVersion={version}&timeoutSeconds=15"))
        except (OSError, http.client.HTTPException) as error:
            heard.append(str(error).encode())

    thread = threading.Thread(target=follow)
    thread.start()
    deadline = time.monotonic() + 10
    while not any("watch" in each.path for each in proxy.seen()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    proxy.silence_watches()
    direct.run("create", "configmap", "unheard")
    through.open(MAPS)  # all else gets through
    proxy.heal()
    thread.join(30)
    assert not thread.is_alive()
    assert b"unheard" not in heard[0]


def test_nothing_gets_through_a_partition(proxy: FaultProxy, through: Client) -> None:
    proxy.partition()
    with pytest.raises(OSError, match=BROKEN):
        through.open(MAPS)
    proxy.heal()
    through.put("healed")
