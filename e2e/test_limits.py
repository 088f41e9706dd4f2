"""Names and numbers at their limits, on the cluster."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from kubernetes.client import CustomObjectsApi

from e2e.support.installation import GROUP, VERSION, Installation, cache_object, pool_object, unique
from e2e.support.kubectl import Kubectl, KubectlError, Object, condition
from orbitkv_operator.cluster.api import load_client

MANY = 1000
FITTING = 128
"""So many of them have room for what each is guaranteed, 1 MiB."""


def name_of(length: int, start: str) -> str:
    """A name with so many characters that no other test has."""
    return f"{unique(start)}{'x' * length}"[:length]


@pytest.fixture(scope="module")
def pool(installation: Installation) -> str:
    """A pool with the longest name that one may have."""
    return installation.make_pool(name_of(50, "p"), memory="128Mi")


def test_pool_with_a_name_of_50_characters_works(clean: Installation, kubectl: Kubectl, pool: str) -> None:
    agents = clean.agents(pool)
    assert agents
    assert all(pod["metadata"]["labels"]["orbitkv.io/pool"] == pool for pod in agents.values())
    clean.make_cache(clean.make_namespace(), pool)
    shown = wait_count(kubectl, pool, 1)
    assert shown["status"]["nodes"]["ready"] == len(agents)


def test_pool_with_a_name_of_51_characters_is_refused(installation: Installation, kubectl: Kubectl) -> None:
    with pytest.raises(KubectlError, match="a pool's name has at most 50 characters"):
        kubectl.apply(pool_object(name_of(51, "p")))


def test_cache_with_a_name_of_253_characters_works(clean: Installation, kubectl: Kubectl, pool: str) -> None:
    namespace = clean.make_namespace()
    name = ".".join(name_of(63, f"c{part}") for part in range(4))[:253]
    clean.make_cache(namespace, pool, name)
    kubectl.patch("cachenamespace", name, {"spec": {"resetGeneration": 1}}, namespace)
    clean.wait_ready("cachenamespace", name, namespace)


def test_wrong_version_of_the_api_is_refused_by_name(installation: Installation, kubectl: Kubectl) -> None:
    wrong = pool_object(unique("pool")) | {"apiVersion": "orbitkv.io/v1"}
    with pytest.raises(KubectlError, match=r'no matches for kind "ManagerPool" in version "orbitkv\.io/v1"'):
        kubectl.apply(wrong)


def test_field_with_a_typing_error_is_refused_by_name(installation: Installation, kubectl: Kubectl) -> None:
    with pytest.raises(KubectlError, match='unknown field "nodeSelektor"'):
        kubectl.apply(pool_object(unique("pool"), nodeSelektor={"a": "b"}))


def test_thousand_caches_share_one_pool(clean: Installation, kubectl: Kubectl, pool: str) -> None:
    namespace = clean.make_namespace()
    wait_count(kubectl, pool, 0)
    started = restarts(clean, pool)
    api = CustomObjectsApi(load_client(str(kubectl.kubeconfig)))  # kubectl asks five times a second
    place = (GROUP, VERSION, namespace, "cachenamespaces")

    def create(index: int) -> None:
        cache = cache_object(f"cache-{index:04}", namespace, pool, quota={"guaranteedDram": "1Mi"})
        api.create_namespaced_custom_object(*place, cache)

    with ThreadPoolExecutor(8) as makers:
        for part in (range(FITTING), range(FITTING, MANY)):  # what was made first is let in first
            list(makers.map(create, part))
    wait_count(kubectl, pool, MANY)

    def decided() -> list[Object]:
        there = kubectl.list_all("cachenamespaces", namespace)
        return [each for each in there if condition(each, "Accepted")]

    # the operator writes three statuses a second, so that all of them take minutes
    kubectl.until(lambda: len(decided()) >= 20, "20 of them to have a status", timeout=90)
    for each in decided():
        fits = each["metadata"]["name"] < f"cache-{FITTING:04}"
        assert condition(each, "Accepted")["reason"] == ("Accepted" if fits else "GuaranteeExceedsPool")
    clean.wait_ready("managerpool", pool)

    api.delete_collection_namespaced_custom_object(*place)
    wait_count(kubectl, pool, 0)
    assert restarts(clean, pool) == started


def restarts(installation: Installation, pool: str) -> dict[str, int]:
    """How often each container of the pool's agents and of the operator has been started again."""
    return {
        f"{pod['metadata']['name']}/{status['name']}": status["restartCount"]
        for pod in [*installation.agents(pool).values(), *installation.operators()]
        for status in pod["status"]["containerStatuses"]
    }


def wait_count(kubectl: Kubectl, pool: str, count: int) -> Object:
    """Waits until the pool's status has the number of cache namespaces."""

    def counted(it: Object) -> bool:
        return bool(it.get("status", {}).get("cacheNamespaces") == count)

    return kubectl.wait("managerpool", pool, counted, f"the pool to count {count} cache namespaces", timeout=90)
