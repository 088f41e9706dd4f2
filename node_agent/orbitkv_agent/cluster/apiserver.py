"""What the agent asks of the apiserver: token reviews, access reviews, and lists and watches of two kinds.

Everything here waits for the network, so it is called by threads other than the owner's.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import kubernetes
import urllib3
from kubernetes.client.exceptions import ApiException

from orbitkv_crds.names import GROUP, VERSION

kube: Any = kubernetes
"""Untyped: the stubs lag behind the library."""

PLURAL: Final = "cachenamespaces"
_CALL_SECONDS: Final = (2.0, 3.0)
"""To connect, and to wait for an answer: a client's hello waits for it."""
_LIST_SECONDS: Final = (5.0, 60.0)
_STREAM_SECONDS: Final = (2 * 3600, 4 * 3600)
"""A stream lasts a random time between these: agents do not all come back at once, and a thousand of them with two
streams each ask the apiserver for little."""
_SILENCE_SECONDS: Final = 150.0
"""A stream on which not even a bookmark came for so long is taken for dead."""
_EXTRA: Final = "authentication.kubernetes.io/"
_SERVICE_ACCOUNT: Final = "system:serviceaccount:"
INVALID: Final = "token-invalid"
"""What is wrong with a token that the apiserver does not accept: forged, expired, or of something that is gone."""


class ApiError(Exception):
    """The apiserver could not be asked, or did not answer; the message says why. Ask again later."""


class Gone(ApiError):
    """The apiserver cannot go on from that resource version: list again."""


@dataclass(frozen=True)
class Pod:
    """The pod that a token was made for."""

    namespace: str
    service_account: str
    name: str
    uid: str
    node: str


class TokenInfo(NamedTuple):
    """What a review says about a token."""

    pod: Pod | None
    """None: the token is not valid, or belongs to no pod."""
    why: str
    """What is wrong with it, for people; empty with a pod."""
    reason: str = INVALID
    """The same in one word: `token-invalid`, `token-audience`, `token-unbound`."""


class Change(NamedTuple):
    """One event of a watch."""

    kind: Literal["put", "gone", "bookmark"]
    object: dict[str, Any]
    version: str


class Apiserver:
    """A connection to the apiserver. For any number of threads.

    Args:
        kubeconfig: file that says how to reach it; empty for the pod's service account.

    Raises:
        ApiError: the service account or the file cannot be read.
    """

    def __init__(self, kubeconfig: str = "") -> None:
        settings = kube.client.Configuration()
        try:
            if kubeconfig:
                kube.config.load_kube_config(kubeconfig, client_configuration=settings)
            else:
                kube.config.load_incluster_config(client_configuration=settings)
        except (kube.config.ConfigException, OSError) as error:
            where = f"kubeconfig {kubeconfig}" if kubeconfig else "the pod's service account"
            raise ApiError(f"{where} cannot be used: {error}") from None
        settings.retries = False  # urllib3 would try again by itself, and take several times as long
        self._client = kube.client.ApiClient(settings)
        self._authentication = kube.client.AuthenticationV1Api(self._client)
        self._authorization = kube.client.AuthorizationV1Api(self._client)

    def close(self) -> None:
        """Close idle connections."""
        self._client.close()

    def review_token(self, token: str, audience: str) -> TokenInfo:
        """Ask whose token this is.

        Raises:
            ApiError: there is no answer.
        """
        status = self._review(token, [audience])
        if not status.get("authenticated"):
            made_for = claimed_audiences(token)
            if made_for and audience not in made_for:
                return TokenInfo(None, _other_audience(audience), "token-audience")
            return TokenInfo(None, _first_line(status.get("error")) or "the apiserver does not accept it", INVALID)
        if audience not in (status.get("audiences") or ()):
            return TokenInfo(None, _other_audience(audience), "token-audience")
        user = status.get("user") or {}
        extra = user.get("extra") or {}
        name, uid, node = (_only(extra.get(_EXTRA + key)) for key in ("pod-name", "pod-uid", "node-name"))
        account = str(user.get("username", ""))
        if not account.startswith(_SERVICE_ACCOUNT) or not uid or not node:
            why = "it is not bound to a pod on a node: a projected service account token is needed"
            return TokenInfo(None, why, "token-unbound")
        namespace, _, service_account = account.removeprefix(_SERVICE_ACCOUNT).partition(":")
        return TokenInfo(Pod(namespace, service_account, name, uid, node), "")

    def may_get(self, token: str, path: str) -> tuple[bool, bool]:
        """Return whether a token is valid, and whether its user may GET a path that is no resource.

        Raises:
            ApiError: there is no answer.
        """
        status = self._review(token, None)
        user = status.get("user") or {}
        if not status.get("authenticated"):
            return False, False
        body: dict[str, Any] = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": user.get("username", ""),
                "uid": user.get("uid", ""),
                "groups": user.get("groups") or [],
                "extra": user.get("extra") or {},
                "nonResourceAttributes": {"path": path, "verb": "get"},
            },
        }
        with _failures("a SubjectAccessReview"):
            review = self._authorization.create_subject_access_review(body, _request_timeout=_CALL_SECONDS)
            return True, bool(self._plain(review)["status"].get("allowed"))

    def _review(self, token: str, audiences: list[str] | None) -> dict[str, Any]:
        spec: dict[str, Any] = {"token": token} | ({"audiences": audiences} if audiences else {})
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        with _failures("a TokenReview"):
            review = self._authentication.create_token_review(body, _request_timeout=_CALL_SECONDS)
            return self._plain(review).get("status") or {}

    def _plain(self, model: Any) -> dict[str, Any]:
        """Return a model as the object that the apiserver sent."""
        plain: dict[str, Any] = self._client.sanitize_for_serialization(model)
        return plain


class Listing:
    """One kind of object, listed and watched. Used by one thread, except for `stop`.

    Args:
        apiserver: where from.
        pool: CacheNamespaces that refer to this pool; None for the cluster's namespaces.
    """

    def __init__(self, apiserver: Apiserver, pool: str | None) -> None:
        api = apiserver._client
        self.what = "namespaces" if pool is None else f"{PLURAL}.{GROUP}"
        self._stopped = False
        self._watch = kube.watch.Watch(return_type="object")
        self._arguments: dict[str, Any] = {}
        if pool is None:
            self._call: Any = kube.client.CoreV1Api(api).list_namespace
            self._places: tuple[str, ...] = ()
        else:
            self._call = kube.client.CustomObjectsApi(api).list_cluster_custom_object
            self._places = (GROUP, VERSION, PLURAL)
            self._arguments["field_selector"] = f"spec.poolRef.name={pool}"
        self._sanitize = api.sanitize_for_serialization

    def stop(self) -> None:
        """End a watch that runs in another thread, and have none start any more."""
        self._stopped = True
        self._watch.stop()

    def all(self) -> tuple[list[dict[str, Any]], str]:
        """Return all objects, as the apiserver has them now, and the resource version to watch from.

        Raises:
            ApiError: there is no answer.
        """
        with _failures(f"a list of {self.what}"):
            answer = self._call(*self._places, **self._arguments, _request_timeout=_LIST_SECONDS)
            listed: dict[str, Any] = self._sanitize(answer)
        return listed["items"], listed["metadata"]["resourceVersion"]

    def changes(self, version: str) -> Iterator[Change]:
        """Return what happens after `version`, until the stream ends in order.

        Raises:
            Gone: the apiserver does not know that version any more.
            ApiError: the stream broke, or went silent.
        """
        if self._stopped:
            return
        with _failures(f"a watch of {self.what}"):
            events = self._watch.stream(
                self._call,
                *self._places,
                **self._arguments,
                resource_version=version,
                allow_watch_bookmarks=True,
                timeout_seconds=random.randint(*_STREAM_SECONDS),
                _request_timeout=(_LIST_SECONDS[0], _SILENCE_SECONDS),
            )
            for event in events:
                found = event["raw_object"]
                kind = {"BOOKMARK": "bookmark", "DELETED": "gone"}.get(event["type"], "put")
                yield Change(kind, found, found["metadata"]["resourceVersion"])  # type: ignore[arg-type]


def claimed_audiences(token: str) -> list[str]:
    """What a token says that it is made for; empty if that cannot be read. Nobody has checked it."""
    try:
        body = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        audiences = claims.get("aud", [])
    except (IndexError, ValueError, AttributeError):
        return []
    return [audiences] if isinstance(audiences, str) else [str(each) for each in audiences]


def _other_audience(audience: str) -> str:
    return f"it is not made for the audience {audience}"


@contextmanager
def _failures(what: str) -> Iterator[None]:
    """Turn what the client raises into `ApiError`, naming what was asked for."""
    try:
        yield
    except ApiException as error:
        if error.status == 410:
            raise Gone(f"{what}: the apiserver does not go back that far") from None
        raise ApiError(f"{what} was refused: {error.status} {_reason(error)}") from None
    except (urllib3.exceptions.HTTPError, OSError, KeyError, ValueError) as error:
        raise ApiError(f"{what} failed: {_cause(error)}") from None


def _reason(error: ApiException) -> str:
    return _first_line(error.reason) or "without a reason"


def _cause(error: BaseException) -> str:
    """The innermost reason: urllib3 wraps them, with addresses of objects in the text."""
    while isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason is not None:
        error = error.reason
    if isinstance(error, urllib3.exceptions.NewConnectionError | urllib3.exceptions.ConnectTimeoutError):
        return "the apiserver cannot be reached"
    if isinstance(error, urllib3.exceptions.ReadTimeoutError):
        return "the apiserver did not answer in time"
    return _first_line(str(error)) or type(error).__name__


def _first_line(text: Any) -> str:
    return str(text or "").strip().split("\n", 1)[0][:300]


def _only(values: Any) -> str:
    return str(values[0]) if isinstance(values, list) and len(values) == 1 else ""
