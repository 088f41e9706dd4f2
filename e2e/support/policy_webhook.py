"""A webhook of somebody else's, as policy engines and meshes have them: it changes every container of a pod."""

import base64
import json
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from e2e.support.kubectl import Kubectl, Object
from orbitkv_operator.certificates import renewed

MIRROR = "mirror.example.com/"
SIDECAR = "policy-sidecar"
VARIABLE = "POLICY"
CONFIGURATION = "mutatingwebhookconfiguration"


def changed(spec: Object) -> list[Object]:
    """The JSON patch for a pod: images from the mirror, a variable in each container, a sidecar before the others."""
    operations: list[Object] = []

    def put(path: str, value: Any) -> None:
        operations.append({"op": "add", "path": path, "value": value})

    for kind in ("initContainers", "containers"):
        for index, each in enumerate(spec.get(kind) or ()):
            if not each["image"].startswith(MIRROR):
                put(f"/spec/{kind}/{index}/image", MIRROR + each["image"])
            if not any(variable["name"] == VARIABLE for variable in each.get("env") or ()):
                put(f"/spec/{kind}/{index}/env", [*(each.get("env") or ()), {"name": VARIABLE, "value": "1"}])
    if not any(each["name"] == SIDECAR for each in spec["containers"]):
        variable = {"name": VARIABLE, "value": "1"}
        put("/spec/containers/0", {"name": SIDECAR, "image": f"{MIRROR}sidecar:1", "env": [variable]})
    return operations


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        """Answers a review."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request"]
        response: Object = {"uid": request["uid"], "allowed": True}
        patch = changed(request["object"]["spec"])
        if patch:
            response |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patch).encode()).decode()}
        body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the apiserver's log has what goes wrong."""


@contextmanager
def policies(kubectl: Kubectl, name: str, namespace: str) -> Iterator[None]:
    """Has the apiserver ask this webhook about the pods of a namespace. Its configuration's name decides when: webhooks
    are asked in the order of their configurations' names."""
    data = renewed(None, ["localhost"])
    assert data is not None
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / each for each in ("tls.crt", "tls.key")]
        for file in files:
            file.write_bytes(base64.b64decode(data[file.name]))
        context.load_cert_chain(files[0], files[1])
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = Thread(target=server.serve_forever, name="policies")
    thread.start()
    webhook = {
        "name": "policies.example.com",
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "clientConfig": {"url": f"https://localhost:{server.server_address[1]}/", "caBundle": data["ca.crt"]},
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "reinvocationPolicy": "IfNeeded",
        "timeoutSeconds": 5,
    }
    kind = "MutatingWebhookConfiguration"
    made = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": name}}
    try:
        kubectl.apply({**made, "webhooks": [webhook]})
        yield
    finally:
        kubectl.delete(CONFIGURATION, name)
        server.shutdown()
        thread.join()
        server.server_close()
