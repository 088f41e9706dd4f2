"""What injection adds to the start of a pod on a real node. Images are on the node.

Four kinds of one pod start in turn: as it is; injected; with an init container that does nothing; and with the payload
as an image volume, which needs no init container. A kubelet looks once a second whether an init container has ended,
so the third kind shows how much of the second's is Kubernetes' own.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any, Final

from bench.figures import Figure, say
from e2e.support.installation import Installation
from e2e.support.target import Target
from orbitkv_crds import names, stamps
from orbitkv_operator.admission.decide import PAYLOAD
from orbitkv_operator.cluster.api import PODS, KubernetesApi

ROUNDS: Final = int(os.environ.get("ORBITKV_BENCH_PAIRS", "10"))
NODE: Final = "node-a"
LIMIT: Final = 60.0
LOOK_SECONDS: Final = 0.02

Object = dict[str, Any]


@dataclass(frozen=True)
class Start:
    """Seconds from the request to make a pod."""

    engine: float
    """Until the engine's container runs its first program, by that program's own clock."""
    running: float
    """Until the API shows it."""


def pod_start(target: Target, api: KubernetesApi, installation: Installation, image: str) -> list[Figure]:
    """Measure on the first node of the project's own cluster, with containers of an image that it has."""
    namespace = installation.make_namespace()
    target.kubectl.wait("serviceaccount", "default", lambda _: True, "its service account", namespace=namespace)
    plain = _pod(image)
    asking = copy.deepcopy(plain)
    asking["metadata"]["annotations"] = {names.ANNOTATION_CACHE_NAMESPACE: "bench"}
    admitted = _admitted(api, namespace, asking)
    kinds = {
        "plain": plain,
        "injected": asking,
        "empty init": _with_empty_init(plain, admitted),
        "image volume": _with_image_volume(plain, admitted),
    }
    for pod in kinds.values():
        _start(target, api, namespace, pod)
    found: list[dict[str, Start]] = []
    for number in range(ROUNDS):
        # a pod ends in step with the kubelet's looks: the rounds' starts are spread over the second between two of them
        wait = number / ROUNDS
        order = list(kinds)[:: 1 if number % 2 else -1]
        found.append({kind: _start(target, api, namespace, kinds[kind], wait) for kind in order})
        said = ", ".join(f"{kind} {found[-1][kind].engine:.2f} ({found[-1][kind].running:.2f})" for kind in kinds)
        say(f"  round {number + 1} of {ROUNDS}: {said}")

    def engine(kind: str) -> float:
        return statistics.median(each[kind].engine - each["plain"].engine for each in found)

    def running(kind: str) -> float:
        return statistics.median(each[kind].running - each["plain"].running for each in found)

    return [
        Figure("pod_start_added_s", engine("injected"), "s", baseline=engine("empty init"), bound=1.0),
        Figure("pod_running_added_s", running("injected"), "s", baseline=running("empty init")),
        Figure("pod_start_image_volume_s", engine("image volume"), "s"),
    ]


def _pod(image: str) -> Object:
    """Return a pod that tells when it began."""
    command = ["sh", "-c", "date +%s.%N; exec sleep infinity"]
    container = {"name": "engine", "image": image, "imagePullPolicy": "Never", "command": command}
    spec = {"containers": [container], "nodeName": NODE, "terminationGracePeriodSeconds": 0}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": spec}


def _named(pod: Object) -> Object:
    return pod | {"metadata": pod["metadata"] | {"name": f"start-{time.monotonic_ns()}"}}


def _admitted(api: KubernetesApi, namespace: str, asking: Object) -> Object:
    """Return the pod as the webhook changes it, once the apiserver knows the webhook."""
    deadline = time.monotonic() + LIMIT
    while True:
        found = api.create(PODS, namespace, _named(asking), dry_run=True)
        if stamps.is_stamped(found["metadata"].get("labels", {})):
            return found
        if time.monotonic() > deadline:
            raise RuntimeError("the webhook does not see the pod: nothing can be measured")
        time.sleep(10 * LOOK_SECONDS)


def _with_empty_init(plain: Object, admitted: Object) -> Object:
    """Return the pod with an init container of the payload's image that does nothing."""
    image = admitted["spec"]["initContainers"][0]["image"]
    init = {"name": "nothing", "image": image, "imagePullPolicy": "Never", "command": ["true"]}
    return plain | {"spec": plain["spec"] | {"initContainers": [init]}}


def _with_image_volume(plain: Object, admitted: Object) -> Object:
    """Return the pod as it is injected, but for the payload, which is an image volume."""
    spec = copy.deepcopy(admitted["spec"])
    init = spec.pop("initContainers")[0]
    volume = {"name": PAYLOAD, "image": {"reference": init["image"], "pullPolicy": "Never"}}
    spec["volumes"] = [volume if each["name"] == PAYLOAD else each for each in spec["volumes"]]
    return plain | {"spec": spec}


def _start(target: Target, api: KubernetesApi, namespace: str, pod: Object, wait: float = 0.0) -> Start:
    time.sleep(wait)
    began, deadline = time.time(), time.monotonic() + LIMIT
    made = api.create(PODS, namespace, _named(pod))
    name = made["metadata"]["name"]
    while (api.get(PODS, namespace, name) or {}).get("status", {}).get("phase") != "Running":
        if time.monotonic() > deadline:
            raise RuntimeError(f"pod {name} does not start: see kubectl describe pod -n {namespace} {name}")
        time.sleep(LOOK_SECONDS)
    running = time.time() - began
    while not (told := target.kubectl.logs(name, namespace, "engine")):
        if time.monotonic() > deadline:
            raise RuntimeError(f"pod {name} does not tell when it began")
    api.delete(PODS, namespace, name, uid=made["metadata"]["uid"])
    target.kubectl.wait_gone("pod", name, namespace)
    return Start(float(told) - began, running)
