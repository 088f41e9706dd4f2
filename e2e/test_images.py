"""The images, as the nodes have them."""

import json
from collections.abc import Callable, Iterator

import pytest

from e2e.support.installation import namespace_object, unique
from e2e.support.kubectl import Kubectl, Object
from e2e.support.target import Target
from images import build

Run = Callable[[Object], str]


@pytest.fixture(scope="module")
def namespace(kubectl: Kubectl, images: list[str]) -> Iterator[str]:
    name = unique("images")
    kubectl.apply(namespace_object(name))
    yield name
    kubectl.delete("namespace", name)


@pytest.fixture
def run(kubectl: Kubectl, namespace: str) -> Run:
    """Runs a pod to its end and returns what it printed."""

    def run_pod(spec: Object) -> str:
        name = unique()
        metadata = {"name": name, "namespace": namespace}
        kubectl.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

        def ended(pod: Object) -> bool:
            return pod["status"].get("phase") in ("Succeeded", "Failed")

        pod = kubectl.wait("pod", name, ended, "the pod's end", namespace=namespace)
        logs = kubectl.logs(name, namespace)
        assert pod["status"]["phase"] == "Succeeded", logs
        return logs

    return run_pod


def pod_spec(image: str, *command: str, **container: object) -> Object:
    main = {"name": "main", "image": image, "command": list(command), **container}
    return {"containers": [main], "restartPolicy": "Never", "terminationGracePeriodSeconds": 0}


def test_the_operators_image_starts_without_root_and_without_a_writable_file(images: list[str], run: Run) -> None:
    security = {
        "runAsNonRoot": True,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    script = "id -u; orbitkv-operator --help"
    uid, usage = run(pod_spec(images[0], "sh", "-c", script, securityContext=security)).split("\n", 1)
    assert uid == "10001"
    assert "usage: orbitkv-operator" in usage


def test_the_agents_image_starts_without_any_capability(images: list[str], run: Run) -> None:
    security = {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    script = "id -u; orbitkv-agent serve --help"
    uid, usage = run(pod_spec(images[1], "sh", "-c", script, securityContext=security)).split("\n", 1)
    assert uid == "0"
    assert "usage: orbitkv-agent serve" in usage


def test_the_plugins_files_are_copied_by_an_init_container_and_found_by_any_python(images: list[str], run: Run) -> None:
    mount = [{"name": "payload", "mountPath": "/orbitkv"}]
    program = (
        "import importlib.metadata, os, orbitkv, orbitkv.sglang.plugin, orbitkv.vllm.plugin; "
        "print(orbitkv.__file__); "
        "points = importlib.metadata.entry_points(name='orbitkv'); "
        "print(*sorted(f'{point.group}={point.value}' for point in points if point.group.endswith('plugins'))); "
        "print(*sorted(os.listdir('/orbitkv')))"
    )
    # the system's Python, as an engine's: it has no package of ours
    spec = pod_spec(
        images[0],
        "/usr/bin/env",
        "-i",
        "PYTHONPATH=/orbitkv",
        "PATH=/usr/local/bin:/usr/bin:/bin",
        "python3",
        "-c",
        program,
        volumeMounts=mount,
    )
    copy = {
        "name": "copy",
        "image": images[2],
        "command": ["/orbitkv-copy", "/orbitkv"],
        "volumeMounts": mount,
    }
    spec = {**spec, "initContainers": [copy], "volumes": [{"name": "payload", "emptyDir": {}}]}
    path, points, files = run(spec).splitlines()
    assert path == "/orbitkv/orbitkv/__init__.py"
    assert points.split() == [
        "sglang.srt.plugins=orbitkv.sglang.plugin:register",
        "vllm.general_plugins=orbitkv.vllm.plugin:register",
    ]
    names = files.split()
    assert "orbitkv" in names
    assert all(name == "orbitkv" or name.endswith(".dist-info") for name in names)


def test_what_did_not_change_is_not_built_again(target: Target, images: list[str]) -> None:
    if target.own is None:
        pytest.skip("images come from a registry here: unset KUBECONFIG")
    before = (build.LAYOUT.folder / "index.json").stat().st_mtime_ns
    assert build.build() == images
    assert (build.LAYOUT.folder / "index.json").stat().st_mtime_ns == before


def test_each_image_has_a_bill_of_its_materials(target: Target, images: list[str]) -> None:
    if target.own is None:
        pytest.skip("images come from a registry here: unset KUBECONFIG")
    bills = {image.name: json.loads((build.RESULTS / f"{image.name}.cdx.json").read_text()) for image in build.IMAGES}
    parts = {name: {part["purl"].split("@")[0] for part in bill["components"]} for name, bill in bills.items()}
    assert {"pkg:pypi/orbitkv", "pkg:pypi/numpy", "pkg:deb/debian/libc6"} <= parts["node-agent"]
    assert {"pkg:pypi/orbitkv", "pkg:pypi/kopf"} <= parts["operator"]
    assert {part for part in parts["engine-plugin"] if part.startswith("pkg:pypi")} == {"pkg:pypi/orbitkv"}
    assert all(bill["metadata"]["component"]["name"] in images for bill in bills.values())
