"""What `make test ONLY=` selects."""

import pytest

from tools.environments import Selection, UnknownPartError, select

ENGINE_TESTS = "engine_plugins/orbitkv/vllm"


def selected(only: str | None) -> list[tuple[str, str]]:
    return [(selection.kind, selection.path) for selection in select(only)]


def test_tests_of_the_connector_run_in_the_engines_environment() -> None:
    path = f"{ENGINE_TESTS}/tests/__init__.py::test_something"
    assert selected("vllm") == [("engine", ENGINE_TESTS)]
    assert selected(path) == [("engine", path)]


def test_tests_on_kubernetes_are_a_kind_of_their_own() -> None:
    assert selected("e2e") == [("cluster", "e2e")]
    assert selected("e2e/cluster") == [("cluster", "e2e/cluster")]


def test_tests_on_kubernetes_are_two_parts_that_have_every_test_between_them() -> None:
    assert select("nodes") == [Selection("cluster", "e2e", "nodes")]
    assert select("apiservers") == [Selection("cluster", "e2e", "not nodes")]


def test_other_parts_and_paths_run_in_the_development_environment() -> None:
    assert selected("node_agent") == [("dev", "node_agent")]
    assert selected("tools/tests") == [("dev", "tools/tests")]


def test_what_holds_both_runs_in_both() -> None:
    assert selected(None) == [("dev", "."), ("engine", ENGINE_TESTS), ("cluster", "e2e")]
    assert selected("engine_plugins") == [("dev", "engine_plugins"), ("engine", ENGINE_TESTS)]


@pytest.mark.parametrize("name", ["no_such_part", "node_agent/no_such_path", "/tmp"])
def test_what_cannot_be_selected_is_refused_with_the_parts_that_can(name: str) -> None:
    with pytest.raises(UnknownPartError, match="protocol, client, node_agent"):
        select(name)
