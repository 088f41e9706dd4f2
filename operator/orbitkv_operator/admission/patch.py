"""From a decision to a JSON patch. A pod that has it all already gets an empty one.

The spec is replaced as a whole, built from what is there: the order of what the pod has stays. (The apiserver takes a
third less time for it than for a path into a container, for which it takes the pod apart level by level.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from orbitkv_crds import names, stamps
from orbitkv_operator.admission.asks import ENGINES
from orbitkv_operator.admission.decide import (
    MARK,
    PAYLOAD,
    SOCKET_VOLUME,
    TOKEN_VOLUME,
    Decision,
    Inject,
    Leave,
    Rules,
    Skip,
)
from orbitkv_operator.cluster.compare import covers

Object = Mapping[str, Any]
Patch = list[dict[str, Any]]
"""Operations as RFC 6902 has them."""

SAFE_TO_EVICT: Final = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
TOKEN_SECONDS: Final = 3600
_COPIED: Final = ("cpu", "memory", "ephemeral-storage")
"""Resources of the engine's container that the init container has too, so that a pod's sums and class stay."""
_SOME_UID: Final = 65532
_PYTHONPATH: Final = "PYTHONPATH"
_ACCOUNT_VOLUME: Final = "kube-api-access-"
"""How the names begin of the volumes by which the apiserver gives containers the token of their ServiceAccount."""


def make_patch(pod: Object, decision: Decision, rules: Rules) -> Patch:
    """Return what has to change about a pod."""
    metadata: Object = pod.get("metadata") or {}
    changes = _changes(metadata, _metadata(metadata, decision, rules))
    # "add" to an object also replaces; a removed last entry leaves an empty field, which means the same
    operations: Patch = [{"op": "add", "path": f"/metadata/{name}", "value": value} for name, value in changes.items()]
    if isinstance(decision, Inject):
        spec: Object = pod["spec"]
        changed = _injected(spec, decision, rules)
        if changed != spec:
            operations.append({"op": "add", "path": "/spec", "value": changed})
    return operations


def _changes(before: Object, after: Object) -> dict[str, Any]:
    """Return the fields of `after` that differ. Nothing is the same as empty."""
    return {name: value for name, value in after.items() if (before.get(name) or None) != (value or None)}


# ------------------------------------------------------------------------------------------------------------- metadata


def _metadata(metadata: Object, decision: Decision, rules: Rules) -> Object:
    annotations = {key: value for key, value in (metadata.get("annotations") or {}).items() if key not in stamps.STAMPS}
    labels = dict(metadata.get("labels") or {})
    if isinstance(decision, Leave):
        labels.pop(names.LABEL_CACHE, None)
        return {"annotations": annotations, "labels": labels}
    labels[names.LABEL_CACHE] = stamps.LABEL_VALUE
    if isinstance(decision, Skip):
        annotations[stamps.ANNOTATION_SKIP_REASON] = stamps.skip_reason(decision.note)
    else:
        annotations[stamps.ANNOTATION_INJECTED] = decision.stamp.write()
        local = [SOCKET_VOLUME] if rules.socket_volume == "hostPath" else []
        local += [PAYLOAD] if decision.stamp.payload == "init" else []
        listed = [name for name in (annotations.get(SAFE_TO_EVICT) or "").split(",") if name]
        if local:
            annotations[SAFE_TO_EVICT] = ",".join([*listed, *(name for name in local if name not in listed)])
    return {"annotations": annotations, "labels": labels}


# ------------------------------------------------------------------------------------------------------------------ pod


def _injected(spec: Object, decision: Inject, rules: Rules) -> Object:
    """Return the spec with all that injection adds."""
    index = decision.target.index
    containers: list[Object] = list(spec["containers"])
    containers[index] = {**containers[index], **_changes(containers[index], _container(containers[index], decision))}
    added = _spec(spec, spec["containers"][index], decision, rules)
    return {**spec, **_changes(spec, added), "containers": containers}


def _spec(spec: Object, container: Object, decision: Inject, rules: Rules) -> Object:
    init = decision.stamp.payload == "init"
    payload = {"name": PAYLOAD, "emptyDir": {}} if init else _image_volume(rules)
    volumes: list[Object] = [
        _socket_volume(rules),
        {"name": TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": _token(rules)}]}},
        payload,
    ]
    kind = "emptyDir" if init else "image"
    there = [each for each in spec.get("volumes") or () if each["name"] != PAYLOAD or kind in each]
    present = spec.get("initContainers") or ()
    copying = _copying([each for each in present if each["name"] == PAYLOAD], _init_container(spec, container, rules))
    others = [each for each in present if each["name"] != PAYLOAD]
    secrets = list(spec.get("imagePullSecrets") or ())
    known = {each.get("name") for each in secrets}
    return {
        "volumes": _merged(there, volumes, "name"),
        "initContainers": [*([copying] if init else []), *others],
        "imagePullSecrets": [*secrets, *({"name": name} for name in decision.ask.pull_secrets if name not in known)],
    }


def _socket_volume(rules: Rules) -> Object:
    if rules.socket_volume == "csi":
        return {"name": SOCKET_VOLUME, "csi": {"driver": names.CSI_DRIVER, "readOnly": True}}
    return {"name": SOCKET_VOLUME, "hostPath": {"path": names.SOCKET_DIRECTORY, "type": "DirectoryOrCreate"}}


def _token(rules: Rules) -> Object:
    path = names.ENGINE_TOKEN_PATH.rpartition("/")[2]
    return {"audience": rules.audience, "expirationSeconds": TOKEN_SECONDS, "path": path}


def _image_volume(rules: Rules) -> Object:
    return {"name": PAYLOAD, "image": {"reference": rules.payload_image, "pullPolicy": rules.pull_policy}}


def _init_container(spec: Object, container: Object, rules: Rules) -> Object:
    """Return what copies the payload; it meets the standard `restricted`, and what the pod may take stays."""
    resources = {
        kind: {
            name: amount
            for name, amount in ((container.get("resources") or {}).get(kind) or {}).items()
            if name in _COPIED
        }
        for kind in ("requests", "limits")
    }
    return {
        "name": PAYLOAD,
        "image": rules.payload_image,
        "imagePullPolicy": rules.pull_policy,
        "command": [names.PAYLOAD_COPY, names.PAYLOAD_PATH],
        "resources": {kind: amounts for kind, amounts in resources.items() if amounts},
        "securityContext": _security(spec.get("securityContext") or {}, container.get("securityContext") or {}),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": PAYLOAD, "mountPath": names.PAYLOAD_PATH},
            # The apiserver would add this to a container that lacks it, and ask every webhook once more because of it.
            *(each for each in container.get("volumeMounts") or () if each["name"].startswith(_ACCOUNT_VOLUME)),
        ],
    }


def _copying(there: list[Object], ours: Object) -> Object:
    """Return the init container that is there if it still copies the payload, else ours.

    A policy may have given it a mirror's image, other resources, or another security context: that stays, as it does
    on the pod's own containers.
    """
    essence = {"name": ours["name"], "command": ours["command"], "volumeMounts": _mounts(ours)}
    return there[0] if there and covers({**there[0], "volumeMounts": _mounts(there[0])}, essence) else ours


def _mounts(container: Object) -> list[Object]:
    """Return a container's mount of the payload: others add theirs to every container."""
    return [each for each in container.get("volumeMounts") or () if each["name"] == PAYLOAD]


def _security(of_pod: Object, of_container: Object) -> Object:
    """Return the init container's security context: as the engine's user, unless that is root.

    Were it another user, the kubelet would give the pod's tokens other modes than without us.
    """
    context: dict[str, Any] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    for name in ("runAsUser", "runAsGroup", "seLinuxOptions"):
        if name in of_container:
            context[name] = of_container[name]
    if {**of_pod, **of_container}.get("runAsUser") == 0:
        context["runAsUser"] = _SOME_UID
    return context


# ------------------------------------------------------------------------------------------------------------ container


def _container(container: Object, decision: Inject) -> Object:
    mounts: list[Object] = [
        {"name": SOCKET_VOLUME, "mountPath": names.SOCKET_DIRECTORY, "readOnly": True},
        {"name": TOKEN_VOLUME, "mountPath": names.ENGINE_TOKEN_PATH.rpartition("/")[0], "readOnly": True},
        {"name": PAYLOAD, "mountPath": names.PAYLOAD_PATH, "readOnly": True},
    ]
    changed: dict[str, Any] = {
        "env": _env(container, decision),
        "volumeMounts": _merged(container.get("volumeMounts") or (), mounts, "mountPath"),
    }
    if decision.arguments:
        changed["args"] = [*(container.get("args") or ()), *decision.arguments]
    return changed


def _env(container: Object, decision: Inject) -> list[Object]:
    ask = decision.ask
    ours = {
        "ORBITKV_CACHE_NAMESPACE": ask.cache,
        "ORBITKV_BOOTSTRAP_SOCKET": names.SOCKET_PATH,
        "ORBITKV_TOKEN_PATH": names.ENGINE_TOKEN_PATH,
        "ORBITKV_ON_MISSING": "run",
        **({"ORBITKV_MODE": ask.mode} if ask.mode else {}),
        **({"ORBITKV_MULTI_CONNECTOR": "true"} if ask.multi_connector else {}),
        MARK: decision.stamp.version,
    }
    env: list[Object] = list(container.get("env") or ())
    folder = names.PAYLOAD_PATH
    if decision.stamp.payload == "imageVolume":
        folder += f"/{names.PAYLOAD_IMAGE_FOLDER}"
    from_elsewhere = bool(container.get("envFrom"))
    # a value from envFrom is hidden by a variable of the same name; the kubelet expands it in there
    rest = f"$({_PYTHONPATH})" if from_elsewhere and not ask.pythonpath else ask.pythonpath
    env = _with_pythonpath(env, folder, rest)
    for engine in ENGINES:
        env = _with_plugin(env, f"{engine.upper()}_PLUGINS")
    return _merged(env, [{"name": name, "value": value} for name, value in ours.items()], "name")


def _with_pythonpath(env: list[Object], folder: str, rest: str) -> list[Object]:
    """Put our folder first, before what the pod sets; where it sets nothing, before `rest`."""
    place = _last(env, _PYTHONPATH)
    if place is None:
        return [*env, {"name": _PYTHONPATH, "value": ":".join(filter(None, (folder, rest)))}]
    variable = env[place]
    if "valueFrom" in variable:
        return _moved(env, place, lambda reference: f"{folder}:{reference}")
    value = str(variable.get("value") or "")
    if value == folder or value.startswith(f"{folder}:"):
        return env
    return _replaced(env, place, [{"name": _PYTHONPATH, "value": ":".join(filter(None, (folder, value)))}])


def _with_plugin(env: list[Object], name: str) -> list[Object]:
    """Add ours to the plugins that an engine is allowed to load, where the pod limits them."""
    place = _last(env, name)
    if place is None:
        return env
    variable = env[place]
    if "valueFrom" in variable:
        return _moved(env, place, lambda reference: f"{reference},orbitkv")
    listed = [each for each in str(variable.get("value") or "").split(",") if each]
    if "orbitkv" in listed:
        return env
    return _replaced(env, place, [{"name": name, "value": ",".join([*listed, "orbitkv"])}])


def _moved(env: list[Object], place: int, value: Any) -> list[Object]:
    """Give a variable that comes from elsewhere a name of ours, and refer to it."""
    name = env[place]["name"]
    moved = f"ORBITKV_{name}"
    return _replaced(env, place, [{**env[place], "name": moved}, {"name": name, "value": value(f"$({moved})")}])


def _last(env: list[Object], name: str) -> int | None:
    """Return the place of the variable that counts: of several with one name the last."""
    return next((place for place in reversed(range(len(env))) if env[place]["name"] == name), None)


def _replaced(env: list[Object], place: int, by: list[Object]) -> list[Object]:
    return [*env[:place], *by, *env[place + 1 :]]


def _merged(there: Iterable[Object], ours: Iterable[Object], key: str) -> list[Object]:
    """Return a list with ours in it: in the place of what has the same key, else at the end."""
    waiting = {each[key].rstrip("/"): each for each in ours}
    keys = set(waiting)
    merged: list[Object] = []
    for each in there:
        name = each[key].rstrip("/")
        if name not in keys:
            merged.append(each)
        elif name in waiting:
            merged.append(_first([each], waiting.pop(name)))
    return [*merged, *waiting.values()]


def _first(there: list[Object], ours: Object) -> Object:
    """Return what is there if it has all of ours: with the API's defaults, and perhaps what somebody has added."""
    return there[0] if there and covers(dict(there[0]), dict(ours)) else ours
