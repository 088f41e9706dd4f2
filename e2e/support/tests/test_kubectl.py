"""What the helpers make of objects."""

from e2e.support.kubectl import condition, has_condition


def an_object(generation: int, **ready: object) -> dict[str, object]:
    status = {"conditions": [{"type": "Ready", **ready}]} if ready else {}
    return {"metadata": {"generation": generation}, "status": status}


def test_a_condition_that_is_not_there_holds_in_no_way() -> None:
    assert condition({"metadata": {}}, "Ready") == {}
    assert not has_condition("Ready")(an_object(1))
    assert not has_condition("Ready", "False")(an_object(1))


def test_a_condition_of_an_earlier_generation_does_not_count() -> None:
    assert has_condition("Ready")(an_object(2, status="True", observedGeneration=2))
    assert not has_condition("Ready")(an_object(3, status="True", observedGeneration=2))


def test_the_reason_counts_where_it_is_asked_for() -> None:
    refused = an_object(1, status="False", reason="NodesOverlap", observedGeneration=1)
    assert has_condition("Ready", "False", "NodesOverlap")(refused)
    assert not has_condition("Ready", "False", "PoolMissing")(refused)
