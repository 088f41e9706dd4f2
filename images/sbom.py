"""The bill of materials of an image, in CycloneDX's JSON: Debian's packages and Python's, read from its files."""

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

from cyclonedx.contrib.this.builders import this_component
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL


def python_packages(root: Path) -> Iterator[Component]:
    """The distributions that an image has installed, in whichever of its folders."""
    seen = set()
    for metadata in sorted(root.rglob("*.dist-info/METADATA")):
        distribution = importlib.metadata.Distribution.at(metadata.parent)
        name, version = distribution.metadata["Name"], distribution.version
        if (name, version) not in seen:
            seen.add((name, version))
            url = PackageURL("pypi", name=name.lower(), version=version)
            yield Component(name=name, version=version, type=ComponentType.LIBRARY, purl=url, bom_ref=str(url))


def debian_packages(root: Path) -> Iterator[Component]:
    """The packages of Debian that an image has installed; none if its base is another system."""
    status = root / "var/lib/dpkg/status"
    for paragraph in status.read_text().split("\n\n") if status.exists() else ():
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and line[0] != " ")
        if "Package" not in fields or not fields.get("Status", "").endswith(" installed"):
            continue
        name, version = fields["Package"], fields["Version"]
        url = PackageURL("deb", "debian", name, version, {"arch": fields["Architecture"]})
        yield Component(name=name, version=version, type=ComponentType.LIBRARY, purl=url, bom_ref=str(url))


def write(image: str, version: str, root: Path, target: Path) -> int:
    """Writes the bill of materials of an image whose files are in `root`. Returns how many components it has."""
    bom = Bom()
    bom.metadata.component = Component(name=image, version=version, type=ComponentType.CONTAINER, bom_ref=image)
    bom.metadata.tools.components.add(this_component())
    components = [*debian_packages(root), *python_packages(root)]
    bom.components.update(components)
    bom.register_dependency(bom.metadata.component, components)
    target.write_text(JsonV1Dot6(bom).output_as_string(indent=2))
    return len(bom.components)
