"""What becomes of the images once they are built."""

from images import build, wheels

NAMES = ("operator", "node-agent", "engine-plugin")


def test_images_are_pushed_under_the_names_that_the_chart_gives_them() -> None:
    calls: list[tuple[str, ...]] = []

    def buildah(*arguments: str) -> str:
        calls.append(arguments)
        return ""

    pushed = build.push("registry.example.com/team/", buildah)
    assert pushed == [f"registry.example.com/team/orbitkv/{name}:{wheels.VERSION}" for name in NAMES]
    assert [call[-2:] for call in calls] == [
        (image.reference, f"docker://{name}") for image, name in zip(build.IMAGES, pushed, strict=True)
    ]
