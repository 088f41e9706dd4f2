"""An apiserver for tests: the few endpoints that the agent asks, over real HTTP, with objects that the test sets."""

from __future__ import annotations

import json
import threading
import urllib.parse
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from orbitkv_crds.names import API_VERSION

CACHE_NAMESPACES = "/apis/orbitkv.io/v1alpha1/cachenamespaces"
NAMESPACES = "/api/v1/namespaces"
TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
AUDIENCE = "orbitkv.io/cluster-1"


class FakeApiserver:
    """Serves until it is left.

    Attributes:
        tokens: status of a TokenReview by token; others are not authenticated.
        readers: users that may GET /metrics.
        requests: how often each path was asked, with "watch " before it for watches.
        stream_seconds: for how long each path was last to be watched.
        refuse: a status to answer everything with, 0 for none.
        forget: watches from before this resource version get 410 Gone.
    """

    def __init__(self, folder: Path) -> None:
        self.tokens: dict[str, dict[str, Any]] = {}
        self.readers: set[str] = set()
        self.requests: Counter[str] = Counter()
        self.stream_seconds: dict[str, int] = {}
        self.audiences: list[list[str]] = []
        self.refuse = 0
        self.forget = 0
        self._objects: dict[str, dict[str, dict[str, Any]]] = {CACHE_NAMESPACES: {}, NAMESPACES: {}}
        self._events: list[tuple[int, str, str, dict[str, Any]]] = []
        self._version = 1
        self._streams = 0
        # Guards all of the above between the test and the threads of requests; waits are for new events.
        self._changed = threading.Condition()
        self._ending = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.api = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self.kubeconfig = str(folder / "kubeconfig")
        server = f"http://127.0.0.1:{self._server.server_address[1]}"
        Path(self.kubeconfig).write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": {"server": server}}],
                    "users": [{"name": "u", "user": {"token": "of-the-agent"}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )

    def __enter__(self) -> Self:
        self._thread.start()
        self.put_namespace("kube-system", uid="cluster-1")
        self.put_namespace("team-a", team="a")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    # ------------------------------------------------------------------------------------ what a test sets

    def put_namespace(self, name: str, uid: str = "", **labels: str) -> None:
        """Make or change a namespace."""
        self._put(NAMESPACES, {"metadata": {"name": name, "uid": uid or f"uid-of-{name}", "labels": labels}})

    def put(
        self, name: str, uid: str, *, pool: str = "default", created: str = "2026-01-01T00:00:00Z", **spec: Any
    ) -> None:
        """Make or change a CacheNamespace, named `namespace/name`; fields of the spec as the API has them."""
        namespace, _, short = name.partition("/")
        metadata = {"namespace": namespace, "name": short, "uid": uid, "generation": 1, "creationTimestamp": created}
        body = {
            "apiVersion": API_VERSION,
            "kind": "CacheNamespace",
            "metadata": metadata,
            "spec": {"poolRef": {"name": pool}} | spec,
        }
        self._put(CACHE_NAMESPACES, body)

    def delete(self, uid: str) -> None:
        """Delete a CacheNamespace."""
        with self._changed:
            body = self._objects[CACHE_NAMESPACES].pop(uid)
            self._happened("DELETED", CACHE_NAMESPACES, body)

    def token(self, token: str, pod: str = "engine-0", namespace: str = "team-a", **more: Any) -> bytes:
        """Make a token of a pod; `more` may give `node`, `account`, `uid`, `audiences`."""
        extra = {
            "authentication.kubernetes.io/pod-name": [pod],
            "authentication.kubernetes.io/pod-uid": [more.get("uid", f"uid-of-{pod}")],
            "authentication.kubernetes.io/node-name": [more.get("node", "node-a")],
        }
        self.tokens[token] = {
            "authenticated": True,
            "audiences": more.get("audiences", [AUDIENCE]),
            "user": {
                "username": f"system:serviceaccount:{namespace}:{more.get('account', 'default')}",
                "uid": "of-the-account",
                "groups": ["system:serviceaccounts"],
                "extra": extra,
            },
        }
        return token.encode()

    def break_streams(self) -> None:
        """End every watch that runs."""
        with self._changed:
            self._streams += 1
            self._changed.notify_all()

    def forget_history(self) -> None:
        """From now on a watch from an older version gets 410 Gone."""
        with self._changed:
            self._version += 1
            self.forget = self._version

    def _put(self, path: str, body: dict[str, Any]) -> None:
        with self._changed:
            known = self._objects[path].get(body["metadata"]["uid"])
            if known is not None:
                body["metadata"]["generation"] = known["metadata"].get("generation", 1) + 1
            self._objects[path][body["metadata"]["uid"]] = body
            self._happened("ADDED" if known is None else "MODIFIED", path, body)

    def _happened(self, kind: str, path: str, body: dict[str, Any]) -> None:
        self._version += 1
        body["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, kind, path, json.loads(json.dumps(body))))
        self._changed.notify_all()

    # --------------------------------------------------------------------------------- threads of requests

    def listed(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        """The answer to a list."""
        with self._changed:
            items = [each for each in self._objects[path].values() if _selected(each, query)]
            return {"kind": "List", "metadata": {"resourceVersion": str(self._version)}, "items": items}

    def next_events(self, path: str, query: dict[str, str], after: int, streams: int) -> list[dict[str, Any]] | None:
        """Wait for events after a version; None when the stream is to end."""
        with self._changed:
            while True:
                if self._ending or self._streams != streams:
                    return None
                found = [
                    {"type": kind, "object": body}
                    for version, kind, its_path, body in self._events
                    if its_path == path and version > after and _selected(body, query)
                ]
                if found:
                    return found
                self._changed.wait(1.0)

    @property
    def streams(self) -> int:
        """How often the watches were broken."""
        with self._changed:
            return self._streams


def _selected(body: dict[str, Any], query: dict[str, str]) -> bool:
    field, _, value = query.get("fieldSelector", "").partition("=")
    return not field or (field == "spec.poolRef.name" and body["spec"]["poolRef"]["name"] == value)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def api(self) -> FakeApiserver:
        api: FakeApiserver = self.server.api  # type: ignore[attr-defined]
        return api

    def do_GET(self) -> None:
        path, _, text = self.path.partition("?")
        query = dict(urllib.parse.parse_qsl(text))
        watching = query.get("watch", "").lower() == "true"
        self.api.requests[("watch " if watching else "") + path] += 1
        if self._refused():
            return
        if watching:
            self._watch(path, query)
        else:
            self._answer(200, self.api.listed(path, query))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.api.requests[self.path] += 1
        if self._refused():
            return
        if self.path == TOKEN_REVIEWS:
            self.api.audiences.append(body["spec"].get("audiences"))
            status = self.api.tokens.get(body["spec"]["token"], {"authenticated": False, "error": "unknown token"})
        else:
            status = {"allowed": body["spec"]["user"] in self.api.readers}
        self._answer(201, body | {"status": status})

    def _refused(self) -> bool:
        if not self.api.refuse:
            return False
        self._answer(self.api.refuse, {"kind": "Status", "code": self.api.refuse, "message": "not now"})
        return True

    def _watch(self, path: str, query: dict[str, str]) -> None:
        after, streams = int(query["resourceVersion"]), self.api.streams
        self.api.stream_seconds[path] = int(query["timeoutSeconds"])
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if after < self.api.forget:
            status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            self._chunk({"type": "ERROR", "object": status})
            self.wfile.write(b"0\r\n\r\n")
            return
        while (events := self.api.next_events(path, query, after, streams)) is not None:
            for event in events:
                after = int(event["object"]["metadata"]["resourceVersion"])
                self._chunk(event)
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, event: dict[str, Any]) -> None:
        line = json.dumps(event).encode() + b"\n"
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.flush()

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def handle(self) -> None:
        """A client that breaks off is no event."""
        try:
            super().handle()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Be silent."""
