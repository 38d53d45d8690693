"""Is this a restart loop? A run that dies again and again without getting anywhere should stop costing money.

What happened before is read from storage by the caller: memory does not survive a reclaim. A wrong stop is
worse than a late one, so whatever is unknown never counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spotsafe import human

FAILED = "failed"
"""`RunEnded.outcome` of an attempt that ended by an error of its own."""
STORAGE_FAILED = "storage_failed"
"""Outcome of an attempt that the store ended: it did not answer, was full, or refused. It says nothing about the
program, and a long outage must not end in a run that nobody starts again; so it never counts here."""
STOPPED = "restart_loop"
"""Outcome of an attempt that this module stopped. Starting again after it is a person's decision."""

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAttempt:
    """One start of the run, as far as it is on record."""

    attempt: int
    started_wall: float
    """Unix time in seconds."""
    end: str | None
    """The outcome, as in `RunEnded`; None if there is no record: a kill, a lost machine, or still running."""
    new_published: bool
    """Whether it published a checkpoint of its own."""
    passed_over_unhealthy_to: str | None = None
    """The checkpoint it resumed from, if it passed over a newer one for being unhealthy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When restarting becomes a loop."""

    starts_per_hour: int = 20
    """More starts than this within an hour are a loop."""
    fruitless: int = 3
    """This many attempts in a row that failed without publishing anything are a loop."""
    same_parent: int = 3
    """This many starts in a row that pass over an unhealthy checkpoint to the same parent are a loop."""

    def __post_init__(self) -> None:
        for name in ("starts_per_hour", "fruitless", "same_parent"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")


def restart_loop(attempts: Sequence[PastAttempt], *, limits: Limits | None = None) -> str | None:
    """Why the attempt that is just starting should not, or None if it should.

    Args:
        attempts: the run's attempts in their order; the last one is the one that is starting.
        limits: other limits than the default.
    """
    limits = limits or Limits()
    if not attempts:
        return None
    return (
        _too_many_starts(attempts, limits.starts_per_hour)
        or _fruitless(attempts[:-1], limits.fruitless)
        or _same_parent(attempts, limits.same_parent)
    )


def _too_many_starts(attempts: Sequence[PastAttempt], most: int) -> str | None:
    now = attempts[-1].started_wall
    # Both directions: hosts' clocks differ, and a start "in the future" was not a day ago.
    starts = sum(abs(now - one.started_wall) < _HOUR_S for one in attempts)
    return f"{starts} starts within an hour (more than {most})" if starts > most else None


def _fruitless(past: Sequence[PastAttempt], most: int) -> str | None:
    """Any other end breaks the row, and so does one without a record: they say nothing about the program."""
    row = past[-most:]
    if len(row) < most or any(one.end != FAILED or one.new_published for one in row):
        return None
    numbers = f"attempt {row[0].attempt}" if most == 1 else f"attempts {row[0].attempt} to {row[-1].attempt}"
    return f"{numbers} failed by an error of their own without publishing a checkpoint"


def _same_parent(attempts: Sequence[PastAttempt], most: int) -> str | None:
    row = attempts[-most:]
    parents = {one.passed_over_unhealthy_to for one in row}
    parent = row[-1].passed_over_unhealthy_to
    if (
        len(row) < most
        or parents != {parent}
        or parent is None
        or any(one.end == STOPPED for one in row[:-1])
    ):
        return None
    starts = human.count(most, "start")
    return f"{starts} in a row went back to {parent} because the values after it were not finite"
