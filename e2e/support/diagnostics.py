"""What is kept of a cluster when a test on it fails."""

import re
from pathlib import Path

from e2e.support.installation import FOREIGN_NAMESPACE, OWN_NAMESPACE
from e2e.support.kubectl import KubectlError
from e2e.support.target import Target

RESULTS = Path(__file__).resolve().parents[2] / "build" / "e2e"
QUESTIONS = {
    "objects.txt": ("get", "nodes,pods,daemonsets,deployments,leases,endpointslices", "-A", "-o", "wide"),
    "events.txt": ("get", "events", "-A", "--sort-by=.lastTimestamp"),
    "orbitkv.yaml": ("get", "managerpools,cachenamespaces", "-A", "-o", "yaml"),
    "pods.txt": ("describe", "pods", "-A"),
}
LOG_LINES = 2000


def collect(target: Target, test: str) -> Path:
    """Writes what can be learned of the cluster to a folder of build/e2e named after the test, and returns it."""
    folder = RESULTS / re.sub(r"[^\w.-]+", "_", test)
    folder.mkdir(parents=True, exist_ok=True)
    for name, question in QUESTIONS.items():
        (folder / name).write_text(ask(target, *question))
    for namespace in (OWN_NAMESPACE, FOREIGN_NAMESPACE):
        names = ask(target, "get", "pods", f"--namespace={namespace}", "-o", "name")
        for pod in (line for line in names.splitlines() if line.startswith("pod/")):
            logs = ["logs", pod, f"--namespace={namespace}", "--all-containers", f"--tail={LOG_LINES}"]
            text = ask(target, *logs, "--previous") + "\n==== present container\n" + ask(target, *logs)
            (folder / f"{pod.removeprefix('pod/')}.log").write_text(text)
    if target.own is not None:
        for log in target.own.logs():
            lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            (folder / f"{log.parent.parent.name}-{log.name}").write_text("\n".join(lines))
    return folder


def ask(target: Target, *question: str) -> str:
    """What kubectl answers, or why it did not."""
    try:
        return target.kubectl.run(*question, timeout=30)
    except (KubectlError, OSError, TimeoutError) as error:
        return f"{error}\n"
