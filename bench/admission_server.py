"""The webhook's server as a process for benches: `python -m bench.admission_server FOLDER`, with the certificate in it.

It has all of the webhook but its watches: what it knows of the cluster is put there at the start. Prints its port.
"""

from __future__ import annotations

import signal
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

from orbitkv_operator.admission.metrics import WebhookMetrics
from orbitkv_operator.admission.review import Reviewer
from orbitkv_operator.admission.server import AdmissionServer
from orbitkv_operator.admission.tests.pods import NAMESPACE, RULES
from orbitkv_operator.certificates import Serving
from orbitkv_operator.cluster.api import CACHES, NAMESPACES, POOLS
from orbitkv_operator.tests.fakes import cache_body, pool_body
from orbitkv_operator.view import View

NAMESPACE_COUNT = 1000


def main() -> int:
    """Serve until SIGTERM."""
    folder = Path(sys.argv[1])
    view = View()
    for number in range(NAMESPACE_COUNT):
        namespace = NAMESPACE if number == 0 else f"{NAMESPACE}-{number}"
        view.put(NAMESPACES, {"metadata": {"name": namespace, "uid": f"uid-{number}", "labels": {}}})
        view.put(CACHES, cache_body("chat", namespace))
    view.put(POOLS, pool_body())
    server = AdmissionServer(0, Reviewer(view, lambda: RULES), WebhookMetrics(lambda: ()))
    certificate, key, bundle = ((folder / name).read_bytes() for name in ("tls.crt", "tls.key", "ca.crt"))
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    server.show(Serving(certificate, key, bundle, datetime.now(UTC)))
    print(server.port, flush=True)
    ended.wait()
    server.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
