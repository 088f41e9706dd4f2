"""What becomes of a pod: left alone, skipped with a reason, or injected. Everything here is a function of data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol

from orbitkv_crds import names, stamps
from orbitkv_crds.meta import Condition, find_condition
from orbitkv_crds.stamps import Injected, Note, PayloadMode
from orbitkv_operator.admission import asks
from orbitkv_operator.admission.asks import Ask
from orbitkv_operator.admission.detect import Target, detect
from orbitkv_operator.view import Cache

Object = Mapping[str, Any]

PodSecurity = Literal["privileged", "baseline", "restricted"]
SocketVolume = Literal["hostPath", "csi"]
ENFORCE: Final = "pod-security.kubernetes.io/enforce"

SOCKET_VOLUME, TOKEN_VOLUME, PAYLOAD = "orbitkv-socket", "orbitkv-token", "orbitkv-payload"
"""Names of volumes; the payload's is also that of the init container."""
MARK: Final = "ORBITKV_INJECTED"
"""Variable that every injected engine has."""
CONNECTOR: Final = json.dumps(
    {
        "kv_connector": "OrbitKVConnector",
        "kv_connector_module_path": "orbitkv.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    },
    separators=(",", ":"),
)
ARGUMENTS: Final = ("--kv-transfer-config", CONNECTOR)
"""What `inject-via: args` appends."""

_SANDBOX: Final = re.compile(r"(?<![a-z0-9])(kata|gvisor|runsc)")
_ENGINE_COMMAND: Final = re.compile(
    r"(\S*/)?vllm serve( |$)|(\S*/)?python[0-9.]* (-\S+ )*-m vllm\.entrypoints\.\S+( |$)"
)


class World(Protocol):
    """What the webhook knows of the cluster. Nothing here waits."""

    def namespace_labels(self, name: str) -> Mapping[str, str] | None:
        """Return the labels of a namespace; None: it is not known."""

    def namespace_annotations(self, name: str) -> Mapping[str, str]:
        """Return the annotations of a namespace."""

    def cache(self, namespace: str, name: str) -> Cache | None:
        """Return a CacheNamespace."""

    def pool(self, name: str) -> dict[str, Any] | None:
        """Return a pool."""


@dataclass(frozen=True)
class Rules:
    """What decisions depend on beside the pod and the cluster's objects."""

    version: str
    payload_image: str
    audience: str
    """Audience of engines' tokens."""
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    payload_mode: PayloadMode = "init"
    image_volumes: bool = False
    """Whether the apiserver keeps image volumes."""
    pull_failing: str = ""
    """Why no node can pull the payload; empty: some node can, or none has tried."""
    pod_security_default: PodSecurity = "privileged"
    """What Pod Security enforces in a namespace without a label."""
    lmcache: bool = False
    socket_volume: SocketVolume = "hostPath"
    """How the folder of the agent's socket gets into a pod: the pod's own mount of it, or our CSI driver's."""


@dataclass(frozen=True)
class Leave:
    """Nobody asked, or the pod opts out."""


@dataclass(frozen=True)
class Skip:
    """The pod asked, and starts without the cache."""

    note: Note


@dataclass(frozen=True)
class Inject:
    """The pod gets what its engine needs."""

    target: Target
    stamp: Injected
    ask: Ask
    arguments: tuple[str, ...] = ()
    """Appended to the container's."""


Decision = Leave | Skip | Inject


def decide(pod: Object, namespace: str, world: World, rules: Rules) -> Decision:
    """Return what becomes of a pod that is made in a namespace."""
    metadata, spec = pod.get("metadata") or {}, pod["spec"]
    annotations: Mapping[str, str] = metadata.get("annotations") or {}
    secrets: tuple[str, ...] = ()
    if rules.lmcache:
        annotations, secrets = asks.from_lmcache(metadata.get("labels") or {}, annotations)
    known = world.namespace_labels(namespace)
    labels = known or {}
    default = world.namespace_annotations(namespace) if labels.get(stamps.ANNOTATION_INJECT) == "true" else None
    ask = asks.read(annotations, namespace, default)
    if ask is None:
        return Leave()
    if isinstance(ask, Note):
        by_default = default is not None and not stamps.asked(annotations)
        return Leave() if by_default and detect(spec, Ask("", by_default=True)) is None else Skip(ask)
    before = injected_container(spec)
    target = detect(spec, ask, before)
    if target is None:
        return Leave()
    if isinstance(target, Note):
        return Skip(target)
    if known is None:
        return Skip(_new_namespace(namespace))
    note = _out_of_reach(spec) or _forbidden(labels, namespace, rules) or _unpullable(rules) or _taken(spec, target)
    if note is not None:
        return Skip(note)
    arguments = _arguments(spec["containers"][target.index], target, before is not None) if ask.via_args else ()
    if isinstance(arguments, Note):
        return Skip(arguments)
    mode: PayloadMode = "imageVolume" if rules.payload_mode == "imageVolume" and rules.image_volumes else "init"
    info = (*_image_volume(rules, mode), *_cache(ask.cache, namespace, labels, _account(spec), world))
    stamp = Injected(rules.version, ask.cache, target.name, target.engine, mode, tuple(info))
    return Inject(target, stamp, _with_secrets(ask, (*rules.pull_secrets, *secrets)), arguments)


def injected_container(spec: Object) -> int | None:
    """Return the place of the container that was injected before, judged from the spec alone; None: none was."""
    volumes = {volume["name"] for volume in spec.get("volumes") or ()}
    if not {SOCKET_VOLUME, TOKEN_VOLUME, PAYLOAD} <= volumes:
        return None
    for index, container in enumerate(spec["containers"]):
        if any(variable["name"] == MARK for variable in container.get("env") or ()):
            return index
    return None


# ------------------------------------------------------------------------------------------------------------- refusals


def _out_of_reach(spec: Object) -> Note | None:
    runtime = str(spec.get("runtimeClassName") or "")
    if _SANDBOX.search(runtime.lower()):
        return Note(
            "runtime-isolated",
            f"The pod runs in a sandbox (runtimeClassName: {runtime}), out of the agent's reach.",
        )
    if (spec.get("os") or {}).get("name") == "windows":
        return Note("runtime-isolated", "The pod is for Windows nodes, and agents run on Linux.")
    return None


def _new_namespace(namespace: str) -> Note:
    return Note(
        "internal-error",
        f"The webhook did not know Namespace {namespace} yet, so it could not tell what Pod Security allows there. "
        "Make the pod anew.",
    )


def _forbidden(labels: Mapping[str, str], namespace: str, rules: Rules) -> Note | None:
    if rules.socket_volume == "csi":
        return None  # which even `restricted` allows
    level = labels.get(ENFORCE)
    if (level or rules.pod_security_default) not in ("baseline", "restricted"):
        return None
    why = (
        f"is labelled {ENFORCE}={level}" if level else f"has no label, and the default is {rules.pod_security_default}"
    )
    return Note(
        "pod-security-forbids-hostpath",
        f"Namespace {namespace} {why}, which forbids the folder {names.SOCKET_DIRECTORY} of the node. Run the engine "
        f"in a namespace that allows it: kubectl label namespace {namespace} {ENFORCE}=privileged --overwrite; or let "
        "those who run the cluster set the chart's injection.socketVolume to csi.",
    )


def _unpullable(rules: Rules) -> Note | None:
    return Note("payload-pull-failing", rules.pull_failing) if rules.pull_failing else None


def _taken(spec: Object, target: Target) -> Note | None:
    """Return what of the pod's own stands where something of ours would."""
    container = spec["containers"][target.index]
    kinds = {SOCKET_VOLUME: ("hostPath", "csi"), TOKEN_VOLUME: ("projected",), PAYLOAD: ("emptyDir", "image")}
    for volume in spec.get("volumes") or ():
        if volume["name"] in kinds and not any(kind in volume for kind in kinds[volume["name"]]):
            return _name_taken(f"has a volume {volume['name']} of its own")
    ours = {names.SOCKET_DIRECTORY: SOCKET_VOLUME, names.PAYLOAD_PATH: PAYLOAD}
    ours[names.ENGINE_TOKEN_PATH.rpartition("/")[0]] = TOKEN_VOLUME
    for mount in container.get("volumeMounts") or ():
        path = mount["mountPath"].rstrip("/")
        if path in ours and mount["name"] != ours[path]:
            return _name_taken(f"mounts its volume {mount['name']} at {path} in container {container['name']}")
    every = [*spec["containers"], *(spec.get("ephemeralContainers") or ())]
    if any(each["name"] == PAYLOAD for each in every):
        return _name_taken(f"has a container {PAYLOAD} of its own")
    return None


def _name_taken(what: str) -> Note:
    return Note(
        "name-taken",
        f"The pod {what}, and injection needs that name. Rename it, or remove what was set up for OrbitKV by hand.",
    )


def _arguments(container: Object, target: Target, before: bool) -> tuple[str, ...] | Note:
    """Return what is appended to the arguments, or why they are not plainly the engine's."""
    if not target.engine:
        return Note(
            "engine-unknown",
            f"{stamps.ANNOTATION_INJECT_VIA}: args needs to know the engine of container {target.name}: set "
            f"{stamps.ANNOTATION_ENGINE}.",
        )
    command, args = list(container.get("command") or ()), list(container.get("args") or ())
    if before and tuple(args[-len(ARGUMENTS) :]) == ARGUMENTS:
        return ()
    if target.engine != "vllm":
        return _unreadable(target, f"this release knows no flags for {target.engine}")
    if any(word.partition("=")[0] == ARGUMENTS[0] for word in (*command, *args)):
        return Note(
            "kv-transfer-config-present",
            f"Container {target.name} has a {ARGUMENTS[0]} already; with {stamps.ANNOTATION_INJECT_VIA}: args there "
            "can be no other. Leave either out.",
        )
    if command and not _ENGINE_COMMAND.match(" ".join(command)):
        return _unreadable(target, f"its command is {_short(command)}")
    if not command and not target.plainly:
        return _unreadable(target, "the image is not known to start the engine")
    if not command and not args:
        return _unreadable(target, "it has neither command nor args")
    if not command and not (args[0].startswith("-") or _ENGINE_COMMAND.match(" ".join(args)) or _is_model(args[0])):
        return _unreadable(target, f"its args begin with {args[0][:60]!r}")
    if "--" in (*command, *args):
        return _unreadable(target, "there is a bare -- among them")
    return ARGUMENTS


def _is_model(word: str) -> bool:
    """Whether a first argument is what `vllm serve` would take as a model: a name or a path, and no shell's line."""
    return bool(re.fullmatch(r"[\w./$(){}:@+-]+", word)) and ("/" in word or "$" in word)


def _unreadable(target: Target, why: str) -> Note:
    return Note(
        "args-unreadable",
        f"Flags are appended only where args are plainly those of `vllm serve`; of container {target.name} {why}. "
        f"Leave {stamps.ANNOTATION_INJECT_VIA} out, or give the flags yourself.",
    )


def _short(words: Sequence[str]) -> str:
    text = " ".join(words)
    return repr(text if len(text) <= 60 else text[:57] + "...")


# ---------------------------------------------------------------------------------------------------------- information


def _image_volume(rules: Rules, mode: PayloadMode) -> tuple[Note, ...]:
    if mode == rules.payload_mode:
        return ()
    return (
        Note("image-volume-unavailable", "The cluster keeps no image volumes: an init container copies the files."),
    )


def _cache(full_name: str, namespace: str, labels: Mapping[str, str], account: str, world: World) -> tuple[Note, ...]:
    where, _, name = full_name.partition("/")
    found = world.cache(where, name)
    if found is None or found.model is None:
        return (
            Note(
                "cache-namespace-not-found",
                f"There was no CacheNamespace {full_name} when the pod was made. Make it; the engine then attaches.",
            ),
        )
    refusal = found.model.spec.access.refusal(where, namespace, labels, account)
    if refusal is not None:
        return (Note("access-denied", f"CacheNamespace {full_name} did not let the pod in: {refusal}."),)
    pool = world.pool(found.pool)
    ready = None if pool is None else _condition(pool, "Ready")
    if ready is None or ready.status != "True":
        why = "it did not exist" if pool is None else ready.message if ready else "it was new"
        return (Note("pool-not-ready", f"ManagerPool {found.pool} was not ready when the pod was made: {why}"),)
    return ()


def _condition(manifest: Mapping[str, Any], kind: str) -> Condition | None:
    conditions = (manifest.get("status") or {}).get("conditions") or ()
    return find_condition([Condition.model_validate(each) for each in conditions if each.get("type") == kind], kind)


def _account(spec: Object) -> str:
    return str(spec.get("serviceAccountName") or "default")


def _with_secrets(ask: Ask, secrets: Sequence[str]) -> Ask:
    return replace(ask, pull_secrets=tuple(dict.fromkeys((*ask.pull_secrets, *secrets))))
