"""Shows what one annotation does on a real Kubernetes: a conversation outlives the pod that computed it.

    python -m tools.demo_k8s [--json]

Starts the cluster of two nodes on this machine if it does not run, installs OrbitKV from its chart, makes a pool and a
cache namespace, and applies a Deployment of vLLM with one annotation. It holds some conversations with it, deletes the
pod, and goes on with the next one. An engine outside of the cluster that knows no cache answers the same prompts.
Exits with 1 if the answers differ, or if nothing came from OrbitKV after the pod was gone. What it made is removed; a
cluster that it started is ended.
"""

import argparse
import json
import os
import signal
import string
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

import yaml

from e2e.cluster.cluster import Cluster
from e2e.cluster.node import Node
from e2e.cluster.processes import ClusterError
from e2e.support import engine_image
from e2e.support.helm import HelmError
from e2e.support.installation import Installation, installed
from e2e.support.kubectl import Kubectl, KubectlError, Object, StillWaitingError, has_condition
from e2e.support.target import connect
from images import build
from orbitkv_crds.names import LABEL_CACHE
from tools import engine_env
from tools.cache import SetUpError
from tools.demo.__main__ import interrupt, make_model
from tools.demo.conversation import ANSWER_TOKENS, QUESTIONS, SYSTEM, TURNS, Step, Transcript, round_of
from tools.demo.progress import Progress
from tools.demo.report import Report, Turn
from tools.demo_k8s.engine import Answer, Engine, EngineError
from tools.harness.engine import EngineProcess, EngineSpec
from tools.harness.process import ProcessError

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples" / "kubernetes"
NAMESPACE = "default"
NODE = "node-a"
APP = "chat-engine"
"""Name of the Deployment and its Service."""
TURNS_BEFORE_DELETION = TURNS - 2
START_SECONDS = 600.0
USE_SECONDS = 60.0
"""Longest wait for the cache namespace's status to show what the engines did: agents report every 15 seconds."""
LATE = "In a status, what is used, asked for and found may be five minutes old; the table below is of now."


def deployment(image: engine_image.EngineImage) -> list[Object]:
    """The objects of deployment.yaml, as they are applied."""
    values = {"image": image.reference, "model": engine_image.MODEL, "node": NODE}
    text = string.Template((HERE / "deployment.yaml").read_text()).substitute(values)
    objects: list[Object] = list(yaml.safe_load_all(text))
    pod = objects[0]["spec"]["template"]["spec"]
    volumes, mounts = image.volumes()
    pod["volumes"] += volumes
    pod["containers"][0]["volumeMounts"] += mounts
    return objects


def ready_pod(kubectl: Kubectl) -> Object | None:
    """The Deployment's pod, if it is ready and stays."""
    for pod in kubectl.list_all("pods", NAMESPACE, f"app={APP}"):
        if "deletionTimestamp" not in pod["metadata"] and has_condition("Ready")(pod):
            return pod
    return None


def wait_pod(kubectl: Kubectl) -> Object:
    """Waits for the Deployment's pod. Raises StillWaitingError with its events and the end of its log."""
    where = [f"--selector=app={APP}", f"--namespace={NAMESPACE}"]
    try:
        kubectl.until(lambda: ready_pod(kubectl) is not None, f"a ready pod of {APP}", timeout=START_SECONDS)
    except StillWaitingError as error:
        described = kubectl.run("describe", "pods", *where)
        raise StillWaitingError(f"{error}\n{described[-4000:]}\n{kubectl.run('logs', *where, '--tail=25')}") from None
    found = ready_pod(kubectl)
    assert found is not None
    return found


@contextmanager
def cluster_and_chart(progress: Progress) -> Iterator[tuple[Installation, list[Node]]]:
    """OrbitKV on the cluster, and the cluster's nodes."""
    started = Cluster.found() is None
    try:
        with ExitStack() as stack:
            with progress.during("starting a Kubernetes of two nodes" if started else "finding the cluster"):
                target = stack.enter_context(connect())
            if target.own is None:
                raise SetUpError("the demo runs on the cluster of this machine: unset KUBECONFIG")
            with progress.during("building the images and loading them into the nodes"):
                build.build()
                build.load(target.own)
            with progress.during("helm install orbitkv charts/orbitkv --namespace orbitkv-system"):
                installation = stack.enter_context(installed(target, {"operator": {"env": []}}))
            yield installation, list(target.own.nodes.values())
    finally:
        if started and Cluster.found() is not None:
            Cluster.down()


def converse(kubectl: Kubectl, reference: EngineProcess, progress: Progress) -> Report:
    """Holds the conversations, and deletes the pod in between."""
    service = kubectl.get("service", APP, NAMESPACE)
    assert service is not None
    engine = Engine(service["spec"]["clusterIP"], "tiny")
    transcript = Transcript(
        engine.tokens_of(SYSTEM), [[engine.tokens_of(text) for text in texts] for texts in QUESTIONS]
    )
    report = Report([], [], "the pod is deleted, and the next one starts")
    which: Literal["first", "restarted"] = "first"
    for turn in range(1, TURNS + 1):
        if turn == TURNS_BEFORE_DELETION + 1:
            name = wait_pod(kubectl)["metadata"]["name"]
            with progress.during(f"kubectl delete pod {name}: all that it had computed is lost to it"):
                kubectl.delete("pod", name, NAMESPACE)
                wait_pod(kubectl)
            which = "restarted"
        progress.say(f"turn {turn} of {TURNS}: {len(QUESTIONS)} sessions ask the pod, then the engine without a cache")
        for step in round_of(turn):
            prompt = transcript.prompt(step)
            answer = engine.ask(prompt, ANSWER_TOKENS)
            report.turns.append(as_turn(step, which, answer))
            if reference.ask(prompt, max_tokens=ANSWER_TOKENS).tokens != answer.tokens:
                report.differing.append((step.session, step.turn))
            transcript.heard(step, answer.tokens)
    return report


def as_turn(step: Step, which: Literal["first", "restarted"], answer: Answer) -> Turn:
    """A line of the table."""
    return Turn(
        session=step.session,
        turn=step.turn,
        engine=which,
        prompt_tokens=answer.prompt_tokens,
        hbm_tokens=answer.hbm,
        orbitkv_tokens=answer.orbitkv,
        recomputed_tokens=answer.computed,
        ttft_ms=round(answer.ttft_ms, 3),
    )


def shows_use(cache: Object) -> bool:
    """Whether the status of a cache namespace says that an engine is attached, and that it has found something."""
    found = cache.get("status", {}).get("lastHour") or {}
    return has_condition("InUse")(cache) and found.get("hitTokens", 0) > 0


def shown(kubectl: Kubectl) -> str:
    """What a user would look at, as kubectl prints it."""
    pod = wait_pod(kubectl)["metadata"]["name"]
    commands = [
        ["get", "mpool"],
        ["get", "cns", "--output=wide", f"--namespace={NAMESPACE}"],
        ["get", "pods", f"--namespace={NAMESPACE}", f"--label-columns=app,{LABEL_CACHE}"],
        ["events", f"--for=pod/{pod}", f"--namespace={NAMESPACE}"],
    ]
    printed = [f"$ kubectl {' '.join(command)}\n{kubectl.run(*command)}" for command in commands]
    return "\n".join([*printed, LATE, ""])


def first_tokens(report: Report) -> str:
    """How long the first token of each pod took: nothing was cached for the first one, and the next one restored."""
    cold = report.turns[0]
    restored = next(turn for turn in report.turns if turn.engine == "restarted")
    return (
        f"First token of the first pod: {cold.ttft_ms:.0f} ms, with {cold.recomputed_tokens} of {cold.prompt_tokens} "
        f"prompt tokens computed; of the next pod: {restored.ttft_ms:.0f} ms, with {restored.recomputed_tokens} of "
        f"{restored.prompt_tokens} computed. A model as small as this one saves little by it."
    )


def run(folder: Path, progress: Progress) -> tuple[Report, str]:
    """The whole demo, with `folder` for what lies outside of the cluster. What it made is removed afterwards."""
    with ExitStack() as stack:
        with progress.during("making a tiny model with random weights"):
            spec = EngineSpec(make_model(folder / "model"), None, {"enable_prefix_caching": False, "dtype": "float32"})
        progress.say("starting an engine outside of the cluster that knows no cache, to compare with")
        reference = stack.enter_context(EngineProcess(folder, spec, "reference")).begin()
        installation, nodes = stack.enter_context(cluster_and_chart(progress))
        kubectl = installation.target.kubectl
        with progress.during("the engine's image"):
            image = engine_image.ensure(nodes)
        progress.say("kubectl apply -f examples/kubernetes")
        kubectl.apply(EXAMPLES)
        try:
            with progress.during("waiting for the pool and the cache namespace"):
                installation.wait_ready("managerpool", "default")
                installation.wait_ready("cachenamespace", "chat", NAMESPACE)
            objects = deployment(image)
            ((key, value),) = objects[0]["spec"]["template"]["metadata"]["annotations"].items()
            progress.say(
                f"kubectl apply -f tools/demo_k8s/deployment.yaml, a Deployment of vLLM annotated {key}: {value}"
            )
            kubectl.apply(*objects, arguments=[f"--namespace={NAMESPACE}"])
            with progress.during("the engine starts in its pod"):
                wait_pod(kubectl)
                reference.ready()
            report = converse(kubectl, reference, progress)
            with progress.during("waiting for its use to show in the status"), suppress(StillWaitingError):
                kubectl.wait("cns", "chat", shows_use, "its use to show", namespace=NAMESPACE, timeout=USE_SECONDS)
            return report, shown(kubectl)
        finally:
            with progress.during("removing all of it"):
                kubectl.run("delete", "deployment,service", APP, f"--namespace={NAMESPACE}", "--ignore-not-found")


def main() -> int:
    """Reads the command line, runs the demo, prints what it found, and returns the exit code."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="make demo-k8s", description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=["vllm"], default="vllm", help="the engine to show it on")
    parser.add_argument("--json", action="store_true", help="end with one JSON object instead of a table")
    options = parser.parse_args()
    progress = Progress("demo-k8s")
    signal.signal(signal.SIGTERM, interrupt)
    try:
        os.environ.setdefault("ORBITKV_ENGINE_PYTHON", str(engine_env.ensure()))
        with tempfile.TemporaryDirectory(prefix="orbitkv-demo-") as folder:
            report, seen = run(Path(folder), progress)
    except KeyboardInterrupt:
        progress.say("interrupted; what was made was removed")
        return 130
    except (SetUpError, ClusterError, HelmError, KubectlError, EngineError) as error:
        progress.say(f"FAILED: {error}")
        return 1
    except (ProcessError, StillWaitingError, TimeoutError) as error:
        progress.say(f"FAILED: {error}")
        return 1
    if options.json:
        print(seen, file=sys.stderr)
        print(json.dumps(report.as_object()))
    else:
        print(f"\n{seen}\n{report.as_text()}\n{first_tokens(report)}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
