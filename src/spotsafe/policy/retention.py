"""What to keep: small values that say which checkpoints stay, and the rule that no policy can break.

A policy (`latest`, `best`, `every`, joined with ``|``) only looks at values and names what it wants to keep.
What is withdrawn is decided by `victims`, which adds the floor of the protocol's rule 7: whatever the policy
says, at least two whole healthy checkpoints stay, and a resume never loses its way back.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

FLOOR = 2
"""Checkpoints that are never given up: one may turn out to be damaged."""

Mode = Literal["min", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A published checkpoint, as far as retention has to know it."""

    name: str
    order: tuple[int, int, int]
    """Attempt, step, number of the save: the only order that checkpoints have."""
    step: int
    created: float
    """Unix time in seconds. Sorts checkpoints into periods, never decides which one is newer."""
    healthy: bool
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)


def _check_count(value: object, *, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} must be a whole number of at least 1, got {value!r}")


class Keep(ABC):
    """A policy. Values of it are equal by content, hashable, picklable and can be joined with ``|``."""

    __slots__ = ()

    @abstractmethod
    def select(self, saved: Sequence[Saved]) -> frozenset[str]:
        """Names of those to keep; `saved` may come in any order."""

    def __or__(self, other: Keep) -> Keep:
        """Keep what either of the two keeps."""
        if not isinstance(other, Keep):
            return NotImplemented
        return AnyOf(tuple(dict.fromkeys((*_parts(self), *_parts(other)))))


@dataclass(frozen=True, slots=True, repr=False)
class Latest(Keep):
    """The newest `n`."""

    n: int

    def __post_init__(self) -> None:
        _check_count(self.n, what="latest(n)")

    def select(self, saved: Sequence[Saved]) -> frozenset[str]:
        """Names of the newest `n`."""
        return _names(newest_first(saved)[: self.n])

    def __repr__(self) -> str:
        return f"latest({self.n})"


@dataclass(frozen=True, slots=True, repr=False)
class Best(Keep):
    """The `n` with the best value of a metric."""

    metric: str
    mode: Mode
    n: int = 1

    def __post_init__(self) -> None:
        if not self.metric:
            raise ValueError("best() needs the name of a metric")
        if self.mode not in {"min", "max"}:
            raise ValueError(f'best({self.metric!r}) needs mode="min" or mode="max", got {self.mode!r}')
        _check_count(self.n, what="best(..., n=)")

    def ranked(self, saved: Iterable[Saved]) -> list[Saved]:
        """Those that have a finite value of the metric, the best first; of equal ones the older first.

        NaN and the infinities are signs of a failed measurement and never count as best.
        """
        sign = 1.0 if self.mode == "min" else -1.0
        measured = [one for one in saved if math.isfinite(one.metrics.get(self.metric, math.nan))]
        return sorted(measured, key=lambda one: (sign * one.metrics[self.metric], *_order(one)))

    def select(self, saved: Sequence[Saved]) -> frozenset[str]:
        """Names of the best `n`; none if none was measured."""
        return _names(self.ranked(saved)[: self.n])

    def __repr__(self) -> str:
        count = f", n={self.n}" if self.n != 1 else ""
        return f'best("{self.metric}", mode="{self.mode}"{count})'


@dataclass(frozen=True, slots=True, repr=False)
class Every(Keep):
    """The first checkpoint of each period, for the last `keep` periods that have one."""

    hours: float
    keep: int

    def __post_init__(self) -> None:
        if isinstance(self.hours, bool) or not (math.isfinite(self.hours) and self.hours > 0):
            raise ValueError(f"every(hours=) must be more than 0, got {self.hours!r}")
        _check_count(self.keep, what="every(keep=)")

    def select(self, saved: Sequence[Saved]) -> frozenset[str]:
        """Names of the first of each period.

        The first, not the last: the last of the current period changes with every save, so that nothing would
        ever grow old enough to be the checkpoint of an hour ago. Periods are ordered by the clock, so that an
        attempt with a wrong one costs a place at most, and what was kept once is not given up for it.
        """
        first: dict[int, Saved] = {}
        for one in reversed(newest_first(saved)):
            first.setdefault(math.floor(one.created / (self.hours * 3600)), one)
        return _names(first[period] for period in sorted(first, reverse=True)[: self.keep])

    def __repr__(self) -> str:
        return f"every(hours={self.hours:g}, keep={self.keep})"


@dataclass(frozen=True, slots=True, repr=False)
class AnyOf(Keep):
    """What at least one of several policies keeps."""

    parts: tuple[Keep, ...]

    def select(self, saved: Sequence[Saved]) -> frozenset[str]:
        """Names that any part keeps."""
        return frozenset[str]().union(*(part.select(saved) for part in self.parts))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


def latest(n: int) -> Keep:
    """Keep the newest `n` checkpoints.

    Raises:
        ValueError: `n` is not a whole number of at least 1.
    """
    return Latest(n)


def best(metric: str, *, mode: Mode, n: int = 1) -> Keep:
    """Keep the `n` checkpoints with the best value of `metric`, as given to ``run.save(metrics=...)``.

    Args:
        metric: name of the metric.
        mode: ``"min"`` if less is better (a loss), ``"max"`` if more is (an accuracy).
        n: how many.

    Raises:
        ValueError: a name, mode or number that means nothing.
    """
    return Best(metric, mode, n)


def every(*, hours: float, keep: int) -> Keep:
    """Keep one checkpoint of every `hours` hours, the last `keep` of them.

    Raises:
        ValueError: `hours` is not above 0 or `keep` is below 1.
    """
    return Every(hours, keep)


def parse_keep(value: int | Keep) -> Keep:
    """The policy that the option ``keep=`` means; a number `n` is `latest(n)`.

    Raises:
        ValueError: a number below 1.
        TypeError: neither a number nor a policy.
    """
    if isinstance(value, Keep):
        return value
    if isinstance(value, int):
        return latest(value)
    raise TypeError(
        f"keep={value!r} is no retention policy; write a number, or latest(3), "
        'best("val_loss", mode="min"), every(hours=1, keep=24), joined with |'
    )


def victims(
    saved: Sequence[Saved], *, keep: Keep, resumed_from: str | None, passed_over: frozenset[str]
) -> list[Saved]:
    """Which published checkpoints to withdraw now, oldest first (rule 7 of the protocol).

    Only healthy checkpoints that the resume did not pass over count. While there is none of them, the policy
    is applied to the unhealthy ones, so that a wrong verdict about health costs nothing.

    Args:
        saved: every published checkpoint of the run, in any order.
        keep: the user's policy.
        resumed_from: name of the checkpoint that this attempt resumed from; stays until two newer healthy
            ones are published.
        passed_over: names that the resume found and did not use (damaged, unhealthy, of another branch);
            they are neither counted nor touched.
    """
    ordered = newest_first(one for one in saved if one.name not in passed_over)
    healthy = [one for one in ordered if one.healthy]
    counted = healthy or ordered
    kept = keep.select(counted) | _names(counted[:FLOOR]) | _names(ordered[:1])
    if len(healthy) < FLOOR:
        kept |= _names(ordered[:FLOOR])
    if resumed_from is not None and _still_needed(resumed_from, ordered=ordered):
        kept |= {resumed_from}
    return [one for one in reversed(ordered) if one.name not in kept]


def newest_first(saved: Iterable[Saved]) -> list[Saved]:
    """Sorted by the order of checkpoints, the newest first."""
    return sorted(saved, key=_order, reverse=True)


def _still_needed(resumed_from: str, *, ordered: Sequence[Saved]) -> bool:
    origin = next((one for one in ordered if one.name == resumed_from), None)
    if origin is None:
        return False
    return sum(one.healthy and one.order > origin.order for one in ordered) < FLOOR


def _order(one: Saved) -> tuple[tuple[int, int, int], str]:
    return (one.order, one.name)


def _names(saved: Iterable[Saved]) -> frozenset[str]:
    return frozenset(one.name for one in saved)


def metrics_of(policy: Keep) -> frozenset[str]:
    """Names of the metrics that a policy goes by."""
    return frozenset(part.metric for part in _parts(policy) if isinstance(part, Best))


def _parts(policy: Keep) -> tuple[Keep, ...]:
    return policy.parts if isinstance(policy, AnyOf) else (policy,)


DEFAULT_KEEP: Keep = latest(2) | every(hours=1, keep=1)
"""Two to resume from, and one that is old enough to be from before a slow decay."""
