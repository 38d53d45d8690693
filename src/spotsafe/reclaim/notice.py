"""What a source says about the end of this machine, as a value."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace


class NoticeKind(enum.Enum):
    """How sure a source is."""

    RECLAIM = "reclaim"
    """Certain: the machine goes. Save and leave."""
    RISK = "risk"
    """It may go, or may not (AWS's rebalance recommendation). Save sooner, do not stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimNotice:
    """One announcement of one source."""

    source: str
    """The name of the watcher or signal that said it."""
    kind: NoticeKind
    action: str
    """What will happen, in the source's own word: ``terminate``, ``stop``, ``hibernate``, ..."""
    deadline: float | None
    """When it happens, in seconds of `Clock.monotonic`; None: the source does not say."""
    received: float
    """When this process learned it, in seconds of `Clock.monotonic`."""

    def seconds_left(self, now: float) -> float | None:
        """Seconds from `now` (`Clock.monotonic`) to the deadline, never below 0; None when there is none."""
        return None if self.deadline is None else max(0.0, self.deadline - now)

    def ending_by(self, deadline: float | None) -> ReclaimNotice:
        """This notice with a deadline not later than `deadline`; None limits nothing."""
        if deadline is None or (self.deadline is not None and self.deadline <= deadline):
            return self
        return replace(self, deadline=deadline)


def deadline_after(seconds: float, *, now: float, at_most: float) -> float:
    """A deadline `seconds` from `now`, clamped to what a source can promise.

    A machine's wall clock may be wrong by any amount, so a duration computed from a wall time of the source
    may come out negative or huge. Neither may leave the range that the source documents.

    Args:
        seconds: the duration as computed; NaN counts as 0.
        now: seconds of `Clock.monotonic`.
        at_most: the longest notice that the source ever gives, in seconds.
    """
    return now + (0.0 if math.isnan(seconds) else min(max(seconds, 0.0), at_most))


def most_urgent(notices: Iterable[ReclaimNotice], kind: NoticeKind) -> ReclaimNotice | None:
    """The notice of that kind that ends first; a known deadline goes before an unknown one.

    An unknown deadline already means "at once" to everyone who plans by it, so the known one says more.
    """
    return min((each for each in notices if each.kind is kind), key=_urgency, default=None)


def is_more_urgent(one: ReclaimNotice, other: ReclaimNotice | None) -> bool:
    """Whether `one` would be chosen before `other` by `most_urgent`."""
    return other is None or _urgency(one) < _urgency(other)


def _urgency(notice: ReclaimNotice) -> tuple[bool, float, float]:
    unknown = notice.deadline is None
    return unknown, 0.0 if notice.deadline is None else notice.deadline, notice.received
