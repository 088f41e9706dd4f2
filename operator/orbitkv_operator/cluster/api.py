"""Requests to the Kubernetes API: plain objects in and out, and errors that say which request failed and why.

`Api` is what the rest of the operator knows; `KubernetesApi` is the real one, tests have one in memory.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import urlencode

import msgspec
import urllib3
from kubernetes.client.api_client import ApiClient
from kubernetes.client.configuration import Configuration
from kubernetes.config.config_exception import ConfigException
from kubernetes.config.incluster_config import load_incluster_config
from kubernetes.config.kube_config import load_kube_config

from orbitkv_operator.names import FIELD_MANAGER

logger = logging.getLogger(__name__)

Manifest = dict[str, Any]
"""A Kubernetes object as JSON has it."""

REQUEST_SECONDS: Final = 15.0
METADATA_ONLY: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
WATCH_SECONDS: Final = 1800
"""How long the apiserver keeps a watch; the next one goes on where it ended."""
PAGE: Final = 500
"""Objects of a list that are asked for at one time."""


@dataclass(frozen=True)
class Resource:
    """A kind, and where the API has it."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    part: str = ""
    """Which of them, where a kind is looked at in two ways: objects of both are kept apart."""

    @property
    def label(self) -> str:
        """What it is called in metrics and logs."""
        return self.part or self.plural

    @property
    def api_version(self) -> str:
        """Group and version as objects carry them."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """Path of group and version."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the path of a collection, an object or a part of it; without namespace: of all namespaces."""
        where = f"{self.root}/namespaces/{namespace}" if self.namespaced and namespace else self.root
        return "/".join(filter(None, (where, self.plural, name, subresource)))


POOLS: Final = Resource("orbitkv.io", "v1alpha1", "managerpools", "ManagerPool", namespaced=False)
CACHES: Final = Resource("orbitkv.io", "v1alpha1", "cachenamespaces", "CacheNamespace")
NODES: Final = Resource("", "v1", "nodes", "Node", namespaced=False)
NAMESPACES: Final = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
PODS: Final = Resource("", "v1", "pods", "Pod")
ENGINE_PODS: Final = Resource("", "v1", "pods", "Pod", part="engine-pods")
"""Pods anywhere that asked for a cache, as the webhook has labelled them."""
SECRETS: Final = Resource("", "v1", "secrets", "Secret")
CONFIG_MAPS: Final = Resource("", "v1", "configmaps", "ConfigMap")
SERVICE_ACCOUNTS: Final = Resource("", "v1", "serviceaccounts", "ServiceAccount")
DAEMON_SETS: Final = Resource("apps", "v1", "daemonsets", "DaemonSet")
DEPLOYMENTS: Final = Resource("apps", "v1", "deployments", "Deployment")
NETWORK_POLICIES: Final = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
POD_MONITORS: Final = Resource("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor")
ENDPOINT_SLICES: Final = Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")
WEBHOOKS: Final = Resource(
    "admissionregistration.k8s.io", "v1", "mutatingwebhookconfigurations", "MutatingWebhookConfiguration", False
)
RUNTIME_CLASSES: Final = Resource("node.k8s.io", "v1", "runtimeclasses", "RuntimeClass", namespaced=False)
DEVICE_CLASSES: Final = Resource("resource.k8s.io", "v1", "deviceclasses", "DeviceClass", namespaced=False)
RESOURCE_SLICES: Final = Resource("resource.k8s.io", "v1", "resourceslices", "ResourceSlice", namespaced=False)
CLAIM_TEMPLATES: Final = Resource("resource.k8s.io", "v1", "resourceclaimtemplates", "ResourceClaimTemplate")
CRDS: Final = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", False)
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases", "Lease")
EVENTS: Final = Resource("events.k8s.io", "v1", "events", "Event")
TOKEN_REVIEWS: Final = Resource("authentication.k8s.io", "v1", "tokenreviews", "TokenReview", namespaced=False)
ACCESS_REVIEWS: Final = Resource(
    "authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", namespaced=False
)


class ApiError(Exception):
    """A request that failed. `status` is the HTTP status; 0: no answer came."""

    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after

    @property
    def lacks_a_right(self) -> bool:
        """Whether it was refused for want of a right. (403 is also what admission answers, for one object.)"""
        return self.status == 403 and 'User "' in str(self)

    @property
    def reason(self) -> str:
        """One of a few words, for metrics."""
        words = {
            0: "unreachable",
            403: "forbidden",
            404: "not-found",
            409: "conflict",
            422: "invalid",
            429: "throttled",
        }
        return words.get(self.status, "server-error" if self.status >= 500 else "refused")


class Stream(Protocol):
    """What comes on a watch, an event a line, until the apiserver ends it. Raises ApiError: the connection is lost."""

    def __iter__(self) -> Iterator[bytes]:
        """Give the lines as they come."""

    def end(self) -> None:
        """Have the iteration end; callable from another thread."""


class Api(Protocol):
    """What the operator asks of the API. All methods raise ApiError."""

    def get(self, resource: Resource, namespace: str | None, name: str) -> Manifest | None:
        """Return an object, or None if there is none."""

    def list_all(self, resource: Resource, namespace: str | None = None, *, labels: str = "") -> list[Manifest]:
        """Return all objects that the label selector `labels` names."""

    def list_metadata(
        self, resource: Resource, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> list[Manifest]:
        """The same with nothing but their metadata, and of those that the field selector `fields` names."""

    def each_metadata(self, resource: Resource) -> Iterator[Manifest]:
        """Give the metadata of all objects of the cluster, a page at a time: they may be more than fit into memory."""

    def list_to_watch(self, resource: Resource, *, labels: str = "", fields: str = "") -> tuple[list[Manifest], str]:
        """Return all objects that both selectors name, and the version from which `stream` goes on."""

    def stream(
        self, resource: Resource, since: str, *, labels: str = "", fields: str = "", silence_seconds: float
    ) -> Stream:
        """Watch from the version `since` on. A connection on which nothing comes for so long counts as lost."""

    def apply(self, resource: Resource, manifest: Manifest, *, subresource: str | None = None) -> Manifest:
        """Apply on the server under the operator's field manager, taking over what others own; return the result."""

    def create(
        self, resource: Resource, namespace: str | None, manifest: Manifest, *, dry_run: bool = False
    ) -> Manifest:
        """Create an object; return it. A dry run goes through admission and leaves nothing."""

    def replace(self, resource: Resource, namespace: str | None, manifest: Manifest) -> Manifest:
        """Replace an object at the resourceVersion that `manifest` has; return it."""

    def delete(self, resource: Resource, namespace: str | None, name: str, *, uid: str) -> None:
        """Delete an object if its uid is still `uid`; it is no error if it is gone."""

    def serves(self, resource: Resource) -> bool:
        """Return whether the API has this kind at present."""

    def server_version(self) -> tuple[int, int]:
        """Return the apiserver's version: major and minor."""


def load_client(kubeconfig: str | None = None) -> Any:
    """Return a client for the cluster that `kubeconfig` names; else for the one that this pod runs in, or $KUBECONFIG.

    Raises:
        ConfigException: there is none.
    """
    settings = Configuration()
    if kubeconfig is not None:
        load_kube_config(config_file=kubeconfig, client_configuration=settings)
    else:
        try:
            load_incluster_config(settings)
        except ConfigException:
            # named here: the library has read the variable when it was imported
            load_kube_config(config_file=os.environ.get("KUBECONFIG"), client_configuration=settings)
    settings.__dict__.update(retries=False, connection_pool_maxsize=16)  # what retries is the queue
    return ApiClient(settings)


class KubernetesApi:
    """The real API, usable from several threads.

    A kind that was forbidden is not asked for again within a second, whoever asks: a missing right costs the
    apiserver no more than that.
    """

    def __init__(self, api_client: Any, *, connect_seconds: float = 5.0, read_seconds: float = REQUEST_SECONDS) -> None:
        self._client = api_client
        self._timeout = urllib3.Timeout(connect=connect_seconds, read=read_seconds)
        self._forbidden: dict[tuple[str, Resource], tuple[float, ApiError]] = {}  # each item is set in one step
        self._reported: dict[tuple[str, Resource], float] = {}

    def get(self, resource: Resource, namespace: str | None, name: str) -> Manifest | None:
        """Return an object, or None if there is none."""
        try:
            return self._ask(resource, "get", "GET", resource.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def list_all(self, resource: Resource, namespace: str | None = None, *, labels: str = "") -> list[Manifest]:
        """Return all objects that the label selector `labels` names."""
        return list(self._pages(resource, namespace, labels, "application/json"))

    def list_metadata(
        self, resource: Resource, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> list[Manifest]:
        """The same with nothing but their metadata, and of those that the field selector `fields` names."""
        return list(self._pages(resource, namespace, labels, METADATA_ONLY, fields))

    def each_metadata(self, resource: Resource) -> Iterator[Manifest]:
        """Give the metadata of all objects of the cluster, a page at a time."""
        return self._pages(resource, None, "", METADATA_ONLY)

    def list_to_watch(self, resource: Resource, *, labels: str = "", fields: str = "") -> tuple[list[Manifest], str]:
        """Return all objects that both selectors name, and the version from which `stream` goes on."""
        found: list[Manifest] = []
        version = ""
        for page in self._each_page(resource, None, _selectors(labels, fields), "application/json"):
            found += page.get("items") or ()
            version = version or str(page["metadata"]["resourceVersion"])  # all pages have that of the first
        return found, version

    def stream(
        self, resource: Resource, since: str, *, labels: str = "", fields: str = "", silence_seconds: float
    ) -> Stream:
        """Watch from the version `since` on. A connection on which nothing comes for so long counts as lost."""
        asked = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_SECONDS)}
        query = asked | {"resourceVersion": since} | _selectors(labels, fields)
        path, timeout = resource.path(), urllib3.Timeout(connect=5.0, read=silence_seconds)
        try:
            return _Lines(self._open("GET", path, query, None, "application/json", "application/json", timeout), path)
        except ApiError as failed:
            if failed.status == 0 or failed.lacks_a_right:
                self._report(("watch", resource), failed)
            raise

    def apply(self, resource: Resource, manifest: Manifest, *, subresource: str | None = None) -> Manifest:
        """Apply on the server under the operator's field manager, taking over what others own; return the result."""
        metadata = manifest["metadata"]
        path = resource.path(metadata.get("namespace"), metadata["name"], subresource)
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return self._ask(resource, "apply", "PATCH", path, query, manifest, "application/apply-patch+yaml")

    def create(
        self, resource: Resource, namespace: str | None, manifest: Manifest, *, dry_run: bool = False
    ) -> Manifest:
        """Create an object; return it. A dry run goes through admission and leaves nothing."""
        query = {"fieldManager": FIELD_MANAGER} | ({"dryRun": "All"} if dry_run else {})
        return self._ask(resource, "create", "POST", resource.path(namespace), query, manifest)

    def replace(self, resource: Resource, namespace: str | None, manifest: Manifest) -> Manifest:
        """Replace an object at the resourceVersion that `manifest` has; return it."""
        path = resource.path(namespace, manifest["metadata"]["name"])
        return self._ask(resource, "update", "PUT", path, {"fieldManager": FIELD_MANAGER}, manifest)

    def delete(self, resource: Resource, namespace: str | None, name: str, *, uid: str) -> None:
        """Delete an object if its uid is still `uid`; it is no error if it is gone."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        try:
            self._ask(resource, "delete", "DELETE", resource.path(namespace, name), {}, options)
        except ApiError as error:
            if error.status not in (404, 409):  # 409: another object has the name by now
                raise

    def serves(self, resource: Resource) -> bool:
        """Return whether the API has this kind at present."""
        try:
            found = self._ask(resource, "discover", "GET", resource.root)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return any(item["name"] == resource.plural for item in found.get("resources", ()))

    def server_version(self) -> tuple[int, int]:
        """Return the apiserver's version: major and minor."""
        found = self._request("GET", "/version", {}, None, "application/json", "application/json")
        major, minor = (re.match(r"\d*", str(found.get(part)))[0] or "0" for part in ("major", "minor"))  # type: ignore[index]
        return int(major), int(minor)

    def _pages(
        self, resource: Resource, namespace: str | None, labels: str, accept: str, fields: str = ""
    ) -> Iterator[Manifest]:
        for page in self._each_page(resource, namespace, _selectors(labels, fields), accept):
            for item in page.get("items") or ():
                if resource.kind == PODS.kind:  # they are many, and this is most of their metadata
                    item["metadata"].pop("managedFields", None)
                yield item

    def _each_page(
        self, resource: Resource, namespace: str | None, selectors: Mapping[str, str], accept: str
    ) -> Iterator[Manifest]:
        query = {"limit": str(PAGE), **selectors}
        while True:
            page = self._ask(resource, "list", "GET", resource.path(namespace), query, accept=accept)
            yield page
            following = page["metadata"].get("continue")
            if not following:
                return
            query = query | {"continue": following}

    def _ask(
        self,
        resource: Resource,
        verb: str,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Manifest | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Manifest:
        what = (verb, resource)
        at, error = self._forbidden.get(what, (0.0, None))
        if error is not None and time.monotonic() - at < 1:
            raise error
        try:
            answer = self._request(method, path, query or {}, body, content_type, accept)
        except ApiError as failed:
            if failed.lacks_a_right:
                self._forbidden[what] = (time.monotonic(), failed)
            if failed.status == 0 or failed.lacks_a_right:
                self._report(what, failed)
            raise
        if error is not None:
            self._forbidden.pop(what, None)
        return answer

    def _report(self, what: tuple[str, Resource], error: ApiError) -> None:
        """Log a missing right, or that no answer comes, once a minute."""
        now = time.monotonic()
        if now - self._reported.get(what, -60.0) < 60:
            return
        self._reported[what] = now
        verb, resource = what
        event = "the apiserver does not answer"
        if error.status == 403:
            event = "a right is missing: compare the operator's Role and ClusterRole with the chart's"
        request = {"verb": verb, "resource": resource.plural, "group": resource.group}
        logger.error(event, extra=request | {"answer": str(error)})

    def _request(
        self, method: str, path: str, query: Mapping[str, str], body: Manifest | None, content_type: str, accept: str
    ) -> Manifest:
        answer = self._open(method, path, query, body, content_type, accept)
        return _read_metadata(answer.data) if accept == METADATA_ONLY else _read(answer.data)

    def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Manifest | None,
        content_type: str,
        accept: str,
        streamed: urllib3.Timeout | None = None,
    ) -> urllib3.BaseHTTPResponse:
        """Send a request and return the answer, read, or (`streamed`: with these times) yet to be read."""
        headers = {"Accept": accept, "User-Agent": FIELD_MANAGER, "Content-Type": content_type}
        auth = self._client.configuration.auth_settings().get("BearerToken")
        if auth and auth.get("value"):
            headers[auth["key"]] = auth["value"]
        pool: urllib3.PoolManager = self._client.rest_client.pool_manager
        try:
            answer = pool.request(
                method,
                self._client.configuration.host + path + ("?" + urlencode(query) if query else ""),
                headers=headers,
                body=None if body is None else json.dumps(body).encode(),
                timeout=streamed or self._timeout,
                preload_content=streamed is None,
                retries=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise ApiError(0, f"{method} {path}: no answer from the apiserver ({error})") from error
        if answer.status >= 400:
            raise _refusal(method, path, answer.status, answer.data, answer.headers.get("Retry-After"))
        return answer


class _Lines:
    """A watch's answer, as `Stream`."""

    def __init__(self, answer: urllib3.BaseHTTPResponse, path: str) -> None:
        self._answer = answer
        self._path = path
        self._ended = False

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        try:
            for piece in self._answer.stream(1 << 16):
                *lines, rest = (rest + piece).split(b"\n")
                yield from lines
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            if not self._ended:
                raise ApiError(0, f"GET {self._path}: the watch was cut off ({error})") from error
        finally:
            self._answer.close()

    def end(self) -> None:
        self._ended = True
        with suppress(ValueError, RuntimeError, OSError):  # it has ended by itself
            self._answer.shutdown()


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {name: value for name, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}


class _Part(msgspec.Struct):
    """An object of a list of metadata, its parts not read yet."""

    metadata: dict[str, msgspec.Raw]


class _Page(msgspec.Struct):
    """A page of such a list."""

    metadata: dict[str, Any]
    items: list[_Part] | None = None
    """None: the apiserver writes an empty list so."""


def _read(body: bytes) -> Manifest:
    found: Manifest = msgspec.json.decode(body)
    return found


def _read_metadata(body: bytes) -> Manifest:
    """Return a list of metadata without who manages which field: that is most of it, and nobody asks for it."""
    page = msgspec.json.decode(body, type=_Page)
    items = [
        {"metadata": {name: msgspec.json.decode(raw) for name, raw in it.metadata.items() if name != "managedFields"}}
        for it in page.items or ()
    ]
    return {"metadata": page.metadata, "items": items}


def _refusal(method: str, path: str, status: int, body: bytes, retry_after: str | None) -> ApiError:
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):  # a proxy answered, not the apiserver
        message = body[:200].decode(errors="replace")
    wait = float(retry_after) if retry_after and retry_after.isdecimal() else None
    return ApiError(status, f"{method} {path}: {message}", wait)
