"""Reading objects without kubectl, whose start takes a tenth of a second of a core: tests ask all the while.

Kinds are named as for kubectl: `pods`, `pod`, `cns`, `events.v1.events.k8s.io`.
"""

import json
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3

from orbitkv_operator.cluster.api import load_client

Object = dict[str, Any]

DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
"""All kinds of an apiserver, in one answer for those of the core and one for all others."""
CONNECT_SECONDS, READ_SECONDS = 5.0, 60.0


class ReadError(Exception):
    """The apiserver cannot be reached or refused; the message is what it said."""


class Reader:
    """Reads from one cluster, over connections that are kept. May be used by several threads.

    The lock guards the connections and the known kinds; nothing waits under it.
    """

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self._lock = threading.Lock()
        self._client: Any = None
        self._version = 0
        """Of the kubeconfig that the connections were made with: another cluster may come in its place."""
        self._kinds: dict[str, tuple[str, bool]] = {}
        """Name to the path of its API and whether it is in namespaces."""

    def get(self, kind: str, name: str, namespace: str | None) -> Object | None:
        """One object; None if it does not exist. Raises ReadError."""
        answer = self._ask(kind, namespace, f"/{name}")
        return None if answer is None else plain(answer)

    def list_all(self, kind: str, namespace: str | None, selector: str) -> list[Object]:
        """All objects of a kind in a namespace, or in all. Raises ReadError."""
        answer = self._ask(kind, namespace, "", {"labelSelector": selector} if selector else {})
        if answer is None:
            raise ReadError(f"there are no {kind}")
        version, of = answer["apiVersion"], answer["kind"].removesuffix("List")
        return [plain({"apiVersion": version, "kind": of, **each}) for each in answer.get("items") or ()]

    def logs(self, pod: str, namespace: str, container: str) -> str:
        """What a container of a pod has logged; without a name that which the pod names, or its first. Raises
        ReadError."""
        if not container:
            found = self.get("pods", pod, namespace)
            if found is None:
                raise ReadError(f'pods "{pod}" not found (NotFound)')
            default = found["metadata"].get("annotations", {}).get("kubectl.kubernetes.io/default-container")
            container = default or found["spec"]["containers"][0]["name"]
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log?{urlencode({'container': container})}"
        status, body = self._get(path)
        if status != 200:
            raise ReadError(refusal(path, status, body))
        return body.decode(errors="replace")

    def _ask(self, kind: str, namespace: str | None, name: str, query: dict[str, str] | None = None) -> Object | None:
        """The answer to a question about a kind; None: such an object does not exist."""
        for attempt in (1, 2):
            place, namespaced = self._kind(kind, anew=attempt == 2)
            folder, _, plural = place.rpartition("/")
            if namespaced and name and not namespace:
                namespace = "default"
            where = f"{folder}/namespaces/{namespace}/{plural}" if namespaced and namespace else place
            path = f"{where}{name}" + (f"?{urlencode(query)}" if query else "")
            status, body = self._get(path)
            if status == 200:
                answer: Object = json.loads(body)
                return answer
            if status != 404:
                raise ReadError(refusal(path, status, body))
            if body.startswith(b"{"):  # else the kind itself is not there any more, or in another version
                return None
        raise ReadError(refusal(path, status, body))

    def _kind(self, name: str, anew: bool) -> tuple[str, bool]:
        """The path of a kind's API and whether it is in namespaces. Asks for all kinds where it is not known."""
        name = name.lower()
        with self._lock:
            found = None if anew else self._kinds.get(name)
        if found is None:
            kinds = self._discovered()
            with self._lock:
                self._kinds = kinds
            found = kinds.get(name)
        if found is None:
            raise ReadError(f'the server doesn\'t have a resource type "{name}"')
        return found

    def _discovered(self) -> dict[str, tuple[str, bool]]:
        found: dict[str, tuple[str, bool]] = {}
        for root in ("/api", "/apis"):
            status, body = self._get(root, DISCOVERY)
            if status != 200:
                raise ReadError(refusal(root, status, body))
            for group in json.loads(body)["items"]:
                of = group["metadata"].get("name", "")
                for version in group["versions"]:
                    for each in version["resources"]:
                        path = "/".join(part for part in (root, of, version["version"], each["resource"]) if part)
                        known = path, each["scope"] == "Namespaced"
                        names = [each["resource"], each.get("singularResource"), *each.get("shortNames", ())]
                        for name in filter(None, names):
                            found.setdefault(name, known)
                            found.setdefault(f"{name}.{of}", known)
                            found.setdefault(f"{name}.{version['version']}.{of}", known)
        return found

    def _get(self, path: str, accept: str = "application/json") -> tuple[int, bytes]:
        """Status and text of an answer. Raises ReadError where none comes."""
        client = self._connected()
        headers = {"Accept": accept}
        auth = client.configuration.auth_settings().get("BearerToken")
        if auth and auth.get("value"):
            headers[auth["key"]] = auth["value"]
        times = urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS)
        pool: urllib3.PoolManager = client.rest_client.pool_manager
        url = client.configuration.host + path
        try:
            answer = pool.request("GET", url, headers=headers, timeout=times, retries=urllib3.Retry(1, redirect=0))
        except urllib3.exceptions.HTTPError as error:
            raise ReadError(f"GET {path}: no answer from the apiserver ({error})") from None
        return answer.status, answer.data

    def _connected(self) -> Any:
        try:
            version = self._kubeconfig.stat().st_mtime_ns
        except OSError as error:
            raise ReadError(f"{self._kubeconfig}: {error.strerror}") from None
        with self._lock:
            if self._client is None or version != self._version:
                self._client, self._version, self._kinds = load_client(str(self._kubeconfig)), version, {}
            return self._client


def plain(found: Object) -> Object:
    """An object without the record of who wrote which field, as kubectl shows it."""
    found["metadata"].pop("managedFields", None)
    return found


def refusal(path: str, status: int, body: bytes) -> str:
    """What the apiserver said, in words as kubectl has them."""
    try:
        told = json.loads(body)
        return f"{told['message']} ({told.get('reason', status)})"
    except (ValueError, LookupError, TypeError):
        return f"GET {path} was answered with {status}: {body[:300].decode(errors='replace')}"
