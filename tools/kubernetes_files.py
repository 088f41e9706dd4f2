"""Files made from the models of Kubernetes objects and from .proto files: CRDs, and the code of what speaks gRPC."""

import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet, ServiceDescriptorProto
from grpc_tools import protoc

from orbitkv_crds.schema import crd_file, crds

ROOT = Path(__file__).resolve().parent.parent
PROTOS = (
    ("crds", Path("orbitkv_crds/agent_api/reports.proto")),
    ("node_agent", Path("orbitkv_agent/csi/csi.proto")),
    ("node_agent", Path("orbitkv_agent/csi/registration.proto")),
)
"""Each with the folder that its package lies in."""
CRD_HEAD = "# Made by `make generate` from crds/orbitkv_crds: change it there.\n"


class CompileError(Exception):
    """A .proto file cannot be compiled; the compiler has written to stderr what is wrong."""


def crd_files() -> dict[str, str]:
    """Return the CustomResourceDefinitions by path."""
    return {f"crds/{crd['metadata']['name']}.yaml": CRD_HEAD + crd_file(crd) for crd in crds()}


def api_files() -> dict[str, str]:
    """Return the code of all .proto files by path.

    Raises:
        CompileError: one is wrong.
    """
    return {path: text for folder, proto in PROTOS for path, text in proto_code(folder, proto).items()}


def proto_code(folder: str, proto: Path) -> dict[str, str]:
    """Return the code of one .proto file by path.

    Raises:
        CompileError: it is wrong.
    """
    with tempfile.TemporaryDirectory() as out:
        kinds = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "pyi")]
        types = Path(out, "types")
        arguments = [
            f"--proto_path={ROOT / folder}",
            *kinds,
            f"--descriptor_set_out={types}",
            str(ROOT / folder / proto),
        ]
        if protoc.main(["protoc", *arguments]):
            raise CompileError(f"{folder}/{proto} cannot be compiled: see above")
        made = {f"{folder}/{it.relative_to(out)}": it.read_text("utf-8") for it in sorted(Path(out).rglob("*.py*"))}
        (file,) = FileDescriptorSet.FromString(types.read_bytes()).file
    return made | {f"{folder}/{proto.parent}/{proto.stem}_pb2_grpc.pyi": service_types(file)}


def service_types(file: FileDescriptorProto) -> str:
    """Return the types of the module that protoc makes for the services of a file: it makes none itself."""
    module = Path(file.name).stem + "_pb2"
    package = str(Path(file.name).parent).replace("/", ".")
    imports = f"import grpc\nimport grpc.aio\n\nfrom {package} import {module}\n"
    return "# Made by `make generate`.\n" + imports + "".join(_types(service, module) for service in file.service)


def _types(service: ServiceDescriptorProto, module: str) -> str:
    def name(full: str) -> str:
        return f"{module}.{full.rpartition('.')[2]}"

    stubs, methods = "", ""
    for method in service.method:
        asks, answers = name(method.input_type), name(method.output_type)
        stubs += f"    {method.name}: grpc.UnaryUnaryMultiCallable[{asks}, {answers}]\n"
        methods += f"    def {method.name}(self, request: {asks}, context: grpc.ServicerContext) -> {answers}: ...\n"
    return (
        f"\nclass {service.name}Stub:\n{stubs}"
        "    def __init__(self, channel: grpc.Channel | grpc.aio.Channel) -> None: ...\n"
        f"\nclass {service.name}Servicer:\n{methods}"
        f"\ndef add_{service.name}Servicer_to_server(\n"
        f"    servicer: {service.name}Servicer, server: grpc.Server | grpc.aio.Server\n) -> None: ...\n"
    )
