"""Quantities are read as Kubernetes reads them: the table was made with its own parser (apimachinery 0.34.4)."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbitkv_crds.quantity import LARGEST, parse_quantity, rounded_size_text, size_text, whole_quantity

READ = [
    ("0", "0", 0),
    ("1", "1", 1),
    ("8Gi", "8589934592", 8589934592),
    ("500m", "0.5", 1),
    ("0.5", "0.5", 1),
    ("1.5Gi", "1610612736", 1610612736),
    (".5Gi", "536870912", 536870912),
    ("2.G", "2000000000", 2000000000),
    ("1e3", "1000", 1000),
    ("1E3", "1000", 1000),
    ("1E", "1000000000000000000", 1000000000000000000),
    ("1e-3", "0.001", 1),
    ("1e+3", "1000", 1000),
    ("+2E", "2000000000000000000", 2000000000000000000),
    ("100n", "0.0000001", 1),
    ("1u", "0.000001", 1),
    ("0.1n", "0.000000001", 1),
    ("0.0000000001", "0.000000001", 1),
    ("1e-12", "0.000000001", 1),
    ("1e-40", "0.000000001", 1),
    ("8Ei", "9223372036854775807", LARGEST),
    ("16Ei", "9223372036854775807", LARGEST),
    ("999999999999999999999999Ki", "9223372036854775807", LARGEST),
    ("1e30", "1000000000000000000000000000000", LARGEST),
    ("100E", "100000000000000000000", LARGEST),
    ("0.3Ki", "307.2", 308),
    ("1.0000000001Ki", "1024.000000103", 1025),
    ("0.000001Ki", "0.001024", 1),
    ("00012", "12", 12),
    ("3Pi", "3377699720527872", 3377699720527872),
    ("7Ti", "7696581394432", 7696581394432),
    ("5Mi", "5242880", 5242880),
    ("1k", "1000", 1000),
    ("1M", "1000000", 1000000),
    ("1T", "1000000000000", 1000000000000),
    ("1P", "1000000000000000", 1000000000000000),
]
REFUSED = ["1_000", "1e", "1e1.5", "1K", "1ki", "1mi", "1 Gi", "8GiB", "1.1.1", "", "٣", "1\n", " 1", "1e3Ki", "0x10"]


@pytest.mark.parametrize(("text", "exact", "whole"), READ)
def test_quantity_is_read_as_kubernetes_reads_it(text: str, exact: str, whole: int) -> None:
    assert parse_quantity(text) == Fraction(exact)
    assert whole_quantity(text) == whole


@pytest.mark.parametrize("text", REFUSED)
def test_what_kubernetes_refuses_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no quantity: write a number"):
        parse_quantity(text)


@pytest.mark.parametrize("text", [".", "+", "Gi"])
def test_quantity_without_a_digit_is_refused(text: str) -> None:
    """Kubernetes takes these for zero."""
    with pytest.raises(ValueError, match="is no quantity"):
        parse_quantity(text)


def test_negative_quantity_is_read() -> None:
    assert parse_quantity("-1.5Gi") == -1610612736
    assert whole_quantity("-0.5") == 0


def test_absurd_exponent_takes_no_memory() -> None:
    assert whole_quantity("1e999999999999") == LARGEST
    assert whole_quantity("1e-999999999999") == 1


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, LARGEST))
def test_size_is_written_without_loss(size: int) -> None:
    assert whole_quantity(size_text(size)) == size


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, LARGEST))
def test_rounded_size_is_short_and_nearly_right(size: int) -> None:
    text = rounded_size_text(size)
    assert len(text) <= 9
    assert abs(whole_quantity(text) - size) <= size * 0.006


def test_sizes_are_written_for_people() -> None:
    assert size_text(1536 << 20) == "1536Mi"
    assert rounded_size_text(1536 << 20) == "1.5Gi"
    assert rounded_size_text(10 << 30) == "10Gi"
    assert (size_text(0), rounded_size_text(0)) == ("0", "0")


def test_truth_value_is_no_quantity_although_it_equals_one() -> None:
    assert parse_quantity(1) == 1
    with pytest.raises(ValueError, match="is no quantity"):
        parse_quantity(True)
