"""What the Containerfiles may use: only what docker and buildah both have, and nothing from the network."""

import itertools
import re
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from images.build import IMAGES, Image

DOCKER = {
    "ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "ONBUILD", "RUN",
    "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
}  # fmt: skip
"""The instructions of docker's reference."""

FLAGS = {"COPY": {"--from", "--chown", "--chmod"}, "FROM": {"--platform"}}
"""Flags of instructions that both builders have without further switches."""

NETWORK = re.compile(r"\b(apt|apt-get|apk|dnf|curl|wget|git|npm)\b")


def problems(text: str, folder: Path) -> list[str]:
    """What is wrong with a Containerfile."""
    (folder / "Dockerfile").write_text(text)
    structure = DockerfileParser(str(folder)).structure
    found = []
    for step in structure:
        instruction, value = step["instruction"], step["value"]
        # those of the instruction itself: what RUN runs has others
        words = itertools.takewhile(lambda word: word.startswith("--"), value.split())
        flags = {word.split("=")[0] for word in words}
        if instruction == "COMMENT":
            continue
        if instruction not in DOCKER:
            found.append(f"{instruction} is not an instruction of docker's")
        if unknown := flags - FLAGS.get(instruction, set()):
            found.append(f"{instruction} {', '.join(sorted(unknown))}: not everywhere")
        if instruction == "ADD":
            found.append("ADD may fetch: use COPY")
        if instruction == "RUN" and NETWORK.search(value):
            found.append(f"reaches the network: {value}")
        if instruction == "RUN" and "install" in value and "--no-index" not in value:
            found.append(f"pip would ask its index: {value}")
        if instruction == "RUN" and "install" in value and "--no-cache-dir" not in value:
            found.append(f"pip would leave its cache: {value}")
        if instruction == "USER" and not re.fullmatch(r"\d+:\d+", value):
            found.append(f"USER {value} is not a number and a group's number")
    first = next(step for step in structure if step["instruction"] != "COMMENT")
    if (first["instruction"], first["value"]) != ("ARG", "BASE=docker.io/library/python:3.12-slim"):
        found.append("does not begin with ARG BASE and its default")
    stages = {"${BASE}"}
    for step in structure:
        if step["instruction"] == "FROM":
            image, *name = step["value"].split()
            if image not in stages:
                found.append("a stage is not built on BASE")
            stages.update(name[1:])
    if "USER" not in [step["instruction"] for step in structure[-3:]]:
        found.append("does not end with its USER and what it runs")
    return found


@pytest.mark.parametrize("image", IMAGES, ids=[image.name for image in IMAGES])
def test_containerfiles_use_what_docker_has_and_no_network(image: Image, tmp_path: Path) -> None:
    assert problems(image.containerfile.read_text(), tmp_path) == []


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("COPY wheels/orbitkv /orbitkv", "ADD https://example.com/a /orbitkv", "ADD may fetch"),
        ("RUN python3", "RUN --mount=type=secret,id=a python3", "RUN --mount"),
        ("COPY --from=project", "COPY --link --from=project", "COPY --link"),
        ("USER 10001:10001", "USER operator", "USER operator is not a number"),
        (" --no-index", "", "pip would ask its index"),
        ("RUN python3", "RUN apt-get update; python3", "reaches the network"),
        ("FROM ${BASE}\n", "FROM debian\n", "not built on BASE"),
        ("USER 10001", "INCLUDE other\nUSER 10001", "INCLUDE is not an instruction"),
    ],
)
def test_what_a_containerfile_may_not_do_is_found(old: str, new: str, named: str, tmp_path: Path) -> None:
    text = IMAGES[0].containerfile.read_text()
    assert old in text
    assert any(named in problem for problem in problems(text.replace(old, new), tmp_path))


def test_users_are_those_that_the_pods_expect(tmp_path: Path) -> None:
    users = {image.name: re.findall(r"^USER (.*)$", image.containerfile.read_text(), re.MULTILINE) for image in IMAGES}
    assert users == {"operator": ["10001:10001"], "node-agent": ["0:0"], "engine-plugin": ["10002:10002"]}
