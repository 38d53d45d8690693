"""The numbers that a save carries for people and for `best`: checked when they are given, not when they are written."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

import torch

from spotsafe.checkpoint.manifest import metrics_problem
from spotsafe.policy.retention import Keep, metrics_of


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What the user gave as metrics, as plain numbers by name. NaN and the infinities are numbers, and never best.

    Raises:
        TypeError: it is no mapping, a name is no text, or a value is no number.
        ValueError: a value is a number that no float can hold.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics= is a dict of numbers by name, got {metrics!r}")
    return {_name(name): _number(name, value) for name, value in metrics.items()}


def merged(asked: Mapping[str, float] | None, metrics: Mapping[str, float]) -> dict[str, float]:
    """All metrics of a save that was asked for more than once; the last value of a name counts.

    Raises:
        ValueError: they do not fit into a manifest; the message says what to do.
    """
    together = {**(asked or {}), **metrics}
    problem = metrics_problem(together)
    if problem is not None:
        raise ValueError(f"metrics= {problem}")
    return together


class BestWatch:
    """Tells once of a `best` that finds nothing, because its metric has another name in the saves.

    Args:
        keep: the policy of retention.
    """

    def __init__(self, keep: Keep) -> None:
        self._unseen = set(metrics_of(keep))  # emptied by the first look

    def saved(self, names: Collection[str]) -> str | None:
        """A line for a person, at the first save with metrics if it lacks one that is kept by; else None."""
        if not names:
            return None
        missing, self._unseen = sorted(self._unseen.difference(names)), set()
        if not missing:
            return None
        near = difflib.get_close_matches(missing[0], sorted(names), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(map(repr, sorted(names)))}"
        return f"keep=best({missing[0]!r}) finds nothing so far: this save has no metric of that name; {hint}"


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of a metric is text, got {name!r}")
    return str.__str__(name)


def _number(name: str, value: Any) -> float:
    value = value.detach() if isinstance(value, torch.Tensor) else value
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"metric {name!r} is {value!r}, which is no number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"metric {name!r} is too large for a float") from None
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"metric {name!r} is {value!r}, which is no number") from error
