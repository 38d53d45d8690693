"""Metrics are judged where they are given, and a `best` that finds nothing is told of once."""

from __future__ import annotations

import enum
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from spotsafe.checkpoint.manifest import METRICS_BYTES
from spotsafe.metrics import BestWatch, merged, numbers_of
from spotsafe.policy.retention import best, latest


class Name(str, enum.Enum):
    """A name that is text and more."""

    LOSS = "loss"


@pytest.mark.parametrize(
    "value",
    [
        0.5,
        True,
        np.float32(0.5),
        torch.tensor(0.5),
        torch.tensor([[0.5]], requires_grad=True),
        torch.tensor(0.5, dtype=torch.bfloat16),
        Decimal("0.5"),
    ],
)
def test_whatever_is_one_number_is_a_metric(value: Any) -> None:
    """A loss can be given as it is, with its gradient; no warning of torch's comes out of it."""
    numbers = numbers_of({"loss": value})
    assert numbers == {"loss": float(value.detach() if isinstance(value, torch.Tensor) else value)}
    assert type(numbers["loss"]) is float


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_failed_measurement_is_a_number(value: float) -> None:
    """It is on record, and retention never takes it for the best."""
    assert str(numbers_of({"loss": value})["loss"]) == str(value)


@pytest.mark.parametrize("value", ["0.5", b"0.5", None, [0.5], torch.zeros(2), torch.zeros(0), 1j, object()])
def test_what_is_no_number(value: Any) -> None:
    """Text is none either, though `float` takes it."""
    with pytest.raises(TypeError, match=r"metric 'loss' is .*no number") as caught:
        numbers_of({"loss": value})
    assert not isinstance(value, str) or caught.value.__cause__ is None


def test_a_number_that_no_float_can_hold() -> None:
    """An error of the value, not an OverflowError from within."""
    with pytest.raises(ValueError, match="metric 'count' is too large"):
        numbers_of({"count": 10**400})


def test_names_are_text() -> None:
    """A number as a name would come back as text; a str of another class is its text."""
    with pytest.raises(TypeError, match="the name of a metric is text, got 3"):
        numbers_of({3: 0.5})  # type: ignore[dict-item] # the mistake itself
    assert [type(name) for name in numbers_of({Name.LOSS: 0.5})] == [str]
    assert numbers_of({Name.LOSS: 0.5}) == {"loss": 0.5}


def test_metrics_are_a_dict() -> None:
    """The common slip is a bare number."""
    with pytest.raises(TypeError, match=r"metrics= is a dict of numbers by name, got 0\.5"):
        numbers_of(0.5)  # type: ignore[arg-type] # the mistake itself


@pytest.mark.parametrize("name", ["", "\ud800", "loss\udfff"])
def test_a_name_that_no_manifest_can_hold(name: str) -> None:
    """JSON has no lone surrogates, and nobody can ask for the best of nothing."""
    with pytest.raises(ValueError, match="metrics= cannot have the name"):
        merged(None, {name: 1.0})


def test_more_than_a_manifest_has_room_for() -> None:
    """Each call may be small: what counts is the save that they make together."""
    half = {f"{number:0400}": 1.0 for number in range(METRICS_BYTES // 500)}
    other = {f"{number:0401}": 1.0 for number in range(METRICS_BYTES // 500)}
    asked = merged(None, half)
    assert asked == half
    with pytest.raises(ValueError, match="room for: give fewer"):
        merged(asked, other)


def test_the_last_value_of_a_name_counts() -> None:
    """As in a dict."""
    assert merged({"loss": 2.0, "kept": 1.0}, {"loss": 0.5}) == {"loss": 0.5, "kept": 1.0}


KEEP = latest(2) | best("val_loss", mode="min") | best("accuracy", mode="max")


def test_a_misspelt_metric_is_told_once_with_the_nearest_name() -> None:
    """At the first save that has metrics; saves without any say nothing."""
    watch = BestWatch(best("val_loss", mode="min"))
    assert watch.saved(()) is None
    text = watch.saved({"val_los": 1.0, "step_time": 2.0})
    assert text is not None
    assert "keep=best('val_loss') finds nothing so far" in text
    assert "did you mean 'val_los'?" in text
    assert watch.saved({"val_los": 1.0}) is None


def test_a_metric_that_is_like_no_other_is_told_with_what_there_is() -> None:
    """Of two policies, the one that finds nothing is named."""
    text = BestWatch(KEEP).saved({"val_loss": 1.0, "x": 2.0})
    assert text is not None
    assert "best('accuracy')" in text
    assert "it has 'val_loss', 'x'" in text


@pytest.mark.parametrize("keep", [KEEP, latest(3)])
def test_nothing_is_told_where_nothing_is_missing(keep: Any) -> None:
    """Also for a policy without any metric."""
    assert BestWatch(keep).saved({"val_loss": 1.0, "accuracy": 2.0}) is None
