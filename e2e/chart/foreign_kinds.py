"""CustomResourceDefinitions of the programs that the chart can work with, from the Go modules that carry them."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.cache import SetUpError


@dataclass(frozen=True)
class Source:
    """A Go module at a version, its checksum, and the files of it that are wanted."""

    module: str
    checksum: str
    files: tuple[str, ...]

    def paths(self) -> Iterator[Path]:
        """Yield the files; Go keeps the module once it was downloaded. Raises SetUpError."""
        command = ["go", "mod", "download", "-json", self.module]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
        if done.returncode:
            raise SetUpError(f"{self.module} cannot be had: {done.stdout}{done.stderr}")
        found = json.loads(done.stdout)
        if found["Sum"] != self.checksum:
            raise SetUpError(f"{self.module} is not what it was: its checksum is {found['Sum']}")
        for name in self.files:
            yield Path(found["Dir"]) / name


MONITORING = "example/prometheus-operator-crd/monitoring.coreos.com"
SOURCES = (
    Source(
        "github.com/prometheus-operator/prometheus-operator@v0.85.0",
        "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
        (f"{MONITORING}_servicemonitors.yaml", f"{MONITORING}_podmonitors.yaml", f"{MONITORING}_prometheusrules.yaml"),
    ),
    Source(
        "github.com/cert-manager/cert-manager@v1.19.2",
        "h1:jSprN1h5pgNDSl7HClAmIzXuTxic/5FXJ32kbQHqjlM=",
        ("deploy/crds/cert-manager.io_certificates.yaml", "deploy/crds/cert-manager.io_issuers.yaml"),
    ),
    Source(
        "github.com/openshift/api@v0.0.0-20251015095338-264e80a2b6e7",
        "h1:Ot2fbEEPmF3WlPQkyEW/bUCV38GMugH/UmZvxpWceNc=",
        ("security/v1/zz_generated.crd-manifests/0000_03_config-operator_01_securitycontextconstraints.crd.yaml",),
    ),
)
