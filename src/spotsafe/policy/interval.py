"""When to save: small values that look at the progress of a run and say whether a save is due.

A policy has no clock and remembers nothing. All ranks hand it the same progress and get the same answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta

from spotsafe import human
from spotsafe.policy.cost import SaveCost, best_interval_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands at a safe point."""

    step: int
    """Steps committed in the whole run."""
    now_s: float
    """Seconds by the monotonic clock."""
    steps_since_save: int
    """Steps committed since the last save began, or since the attempt began."""
    seconds_since_save: float
    """Seconds since the last save began, or since the attempt began."""
    saves: int
    """Saves begun in this attempt."""
    epoch_ended: bool = False
    """Whether this safe point is the end of an epoch."""
    blocking_s: float | None = None
    """How long the last finished save stopped training; None before there is one."""
    write_s: float | None = None
    """How long the last finished save took to write; None before there is one."""

    @property
    def cost(self) -> SaveCost | None:
        """What a save costs, as far as it is known."""
        if self.blocking_s is None:
            return None
        return SaveCost(blocking_s=self.blocking_s, write_s=self.write_s or 0.0)


class SavePolicy(ABC):
    """Says when a save is due. Frozen values; join them with ``|``; derive from it for one of your own."""

    __slots__ = ()

    @abstractmethod
    def due(self, progress: Progress) -> bool:
        """Whether to save at this safe point."""

    @abstractmethod
    def describe(self, cost: SaveCost | None = None) -> str:
        """The policy in words, to stand behind "saving ": ``every 100 steps``.

        Args:
            cost: what a save was measured to cost, for policies that depend on it.
        """

    def __or__(self, other: SavePolicy) -> SavePolicy:
        """Save when either of the two is due."""
        if not isinstance(other, SavePolicy):
            return NotImplemented
        return AnyDue(tuple(dict.fromkeys((*_parts(self), *_parts(other)))))


@dataclass(frozen=True, slots=True, repr=False)
class EverySteps(SavePolicy):
    """At every step that is a multiple of `n`."""

    n: int

    def __post_init__(self) -> None:
        _check_steps(self.n)

    def due(self, progress: Progress) -> bool:
        """Whether a multiple was reached since the last save; one that was missed is made up for."""
        return progress.step // self.n > (progress.step - progress.steps_since_save) // self.n

    def describe(self, cost: SaveCost | None = None) -> str:
        """In words."""
        del cost
        return "every step" if self.n == 1 else f"every {self.n:,} steps"

    def __repr__(self) -> str:
        return f"every_steps({self.n})"


@dataclass(frozen=True, slots=True, repr=False)
class EveryTime(SavePolicy):
    """After each span of time."""

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"every_time() must be more than no time, got {self.seconds:g} s")

    def due(self, progress: Progress) -> bool:
        """Whether the time is over and there is something new to save."""
        return progress.steps_since_save > 0 and progress.seconds_since_save >= self.seconds

    def describe(self, cost: SaveCost | None = None) -> str:
        """In words."""
        del cost
        return f"every {human.duration(self.seconds)}"

    def __repr__(self) -> str:
        return f"every_time(timedelta(seconds={self.seconds:g}))"


@dataclass(frozen=True, slots=True, repr=False)
class EveryEpoch(SavePolicy):
    """At the end of each epoch."""

    def due(self, progress: Progress) -> bool:
        """Whether an epoch ended here (its tail may have changed state after the last step was saved)."""
        return progress.epoch_ended

    def describe(self, cost: SaveCost | None = None) -> str:
        """In words."""
        del cost
        return "at the end of every epoch"

    def __repr__(self) -> str:
        return "every_epoch()"


@dataclass(frozen=True, slots=True, repr=False)
class Never(SavePolicy):
    """Not on its own: when asked, at a notice, at the end."""

    def due(self, progress: Progress) -> bool:
        """Never."""
        del progress
        return False

    def describe(self, cost: SaveCost | None = None) -> str:
        """In words."""
        del cost
        return "only when asked, at a notice and at the end"

    def __repr__(self) -> str:
        return "never()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto(SavePolicy):
    """By what a save costs and how often the job is interrupted; see `auto`."""

    interruptions_per_hour: float = 0.1
    saved_by_notice: float = 0.0
    slowdown: float = 0.0
    first_s: float = 60.0
    shortest_s: float = 60.0
    longest_s: float = 1800.0
    write_share: float = 0.2

    def __post_init__(self) -> None:
        if not self.interruptions_per_hour >= 0:
            raise ValueError(
                f"interruptions_per_hour must be at least 0, got {self.interruptions_per_hour!r}"
            )
        if not 0 <= self.saved_by_notice <= 1:
            raise ValueError(f"saved_by_notice is a share from 0 to 1, got {self.saved_by_notice!r}")
        if not self.slowdown >= 0:
            raise ValueError(f"slowdown must be at least 0, got {self.slowdown!r}")
        if not 0 < self.shortest_s <= self.longest_s or not self.first_s > 0:
            raise ValueError("auto() needs first > 0 and 0 < shortest <= longest")
        if not 0 < self.write_share <= 1:
            raise ValueError(f"write_share is a share above 0, at most 1, got {self.write_share!r}")

    def interval_s(self, cost: SaveCost) -> float:
        """Seconds between two saves that cost this much.

        The bound on writing is the last word: a state so large that it would be written all the time is saved
        less often than `longest_s`.
        """
        best = best_interval_s(
            cost,
            interruptions_per_hour=self.interruptions_per_hour,
            saved_by_notice=self.saved_by_notice,
            slowdown=self.slowdown,
        )
        clamped = min(max(best, self.shortest_s), self.longest_s)
        return max(clamped, cost.busy_s / self.write_share)

    def due(self, progress: Progress) -> bool:
        """Whether the first save, or the next one, is due."""
        if progress.steps_since_save == 0:
            return False
        if progress.saves == 0:
            return progress.seconds_since_save >= self.first_s
        cost = progress.cost
        return progress.seconds_since_save >= (self.shortest_s if cost is None else self.interval_s(cost))

    def describe(self, cost: SaveCost | None = None) -> str:
        """In words; with numbers once a save was measured."""
        if cost is None:
            return (
                f"first after {human.duration(self.first_s)}, then every {human.duration(self.shortest_s)} "
                f"to {human.duration(self.longest_s)} (auto: by what a save costs)"
            )
        return (
            f"every {human.duration(self.interval_s(cost))} (auto: a save stops training for "
            f"{human.duration(cost.blocking_s)} and is written in {human.duration(cost.write_s)}; "
            f"{self.interruptions_per_hour:g} interruptions per hour)"
        )


@dataclass(frozen=True, slots=True, repr=False)
class AnyDue(SavePolicy):
    """When at least one of several policies is due."""

    parts: tuple[SavePolicy, ...]

    def due(self, progress: Progress) -> bool:
        """Whether any part is due."""
        return any(part.due(progress) for part in self.parts)

    def describe(self, cost: SaveCost | None = None) -> str:
        """In words."""
        return " and ".join(part.describe(cost) for part in self.parts)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


def every_steps(n: int) -> SavePolicy:
    """Save at every step that is a multiple of `n`.

    Raises:
        ValueError: `n` is not a whole number of at least 1.
    """
    return EverySteps(n)


def every_time(interval: timedelta) -> SavePolicy:
    """Save once `interval` has passed since the last save.

    Raises:
        ValueError: the interval is not above zero.
    """
    return EveryTime(interval.total_seconds())


def every_epoch() -> SavePolicy:
    """Save at the end of each epoch."""
    return EveryEpoch()


def never() -> SavePolicy:
    """Save only when asked, at a notice and at the end."""
    return Never()


def auto(
    *,
    interruptions_per_hour: float = 0.1,
    saved_by_notice: float = 0.0,
    slowdown: float = 0.0,
    first: timedelta = timedelta(minutes=1),
    shortest: timedelta = timedelta(minutes=1),
    longest: timedelta = timedelta(minutes=30),
    write_share: float = 0.2,
) -> SavePolicy:
    """Save as often as loses the least time, given what a save was measured to cost (see `policy.cost`).

    Args:
        interruptions_per_hour: how often this job is interrupted.
        saved_by_notice: share of interruptions that end in a published final save.
        slowdown: share by which training is slower while a save is written.
        first: when the first save of an attempt is due; it shows early whether saving works at all.
        shortest: never save more often.
        longest: never save less often, unless `write_share` asks for it.
        write_share: the most of the time that may be spent writing; uploads cost money too.

    Raises:
        ValueError: a number that means nothing.
    """
    return Auto(
        interruptions_per_hour=interruptions_per_hour,
        saved_by_notice=saved_by_notice,
        slowdown=slowdown,
        first_s=first.total_seconds(),
        shortest_s=shortest.total_seconds(),
        longest_s=longest.total_seconds(),
        write_share=write_share,
    )


def parse_save_every(value: str | int | timedelta | SavePolicy | None) -> SavePolicy:
    """The policy that the option ``save_every=`` means.

    Args:
        value: ``"auto"``, a number of steps, a timedelta, ``"epoch"``, a policy, or None for `never`.

    Raises:
        ValueError: a word that is none of these, or a number or time that is not above zero.
        TypeError: something else.
    """
    if isinstance(value, SavePolicy):
        return value
    if value is None:
        return never()
    if isinstance(value, timedelta):
        return every_time(value)
    if isinstance(value, int):
        if value < 1 or isinstance(value, bool):
            raise ValueError(f"save_every={value!r} means nothing; {_CHOICES}")
        return every_steps(value)
    if isinstance(value, str):
        return _parse_word(value)
    raise TypeError(f"save_every={value!r} means nothing; {_CHOICES}")


_CHOICES = (
    'write "auto", "epoch", a number of steps, a timedelta, '
    "a policy such as every_steps(100) | every_epoch(), or None"
)


def _parse_word(word: str) -> SavePolicy:
    words = {"auto": auto, "epoch": every_epoch}
    if word not in words:
        raise ValueError(f"save_every={word!r} means nothing; {_CHOICES}")
    return words[word]()


def _check_steps(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"a number of steps must be a whole number of at least 1, got {value!r}")


def _parts(policy: SavePolicy) -> tuple[SavePolicy, ...]:
    return policy.parts if isinstance(policy, AnyDue) else (policy,)
