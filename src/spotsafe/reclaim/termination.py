"""A key of a metadata service that holds the time at which the machine goes, as Alibaba and Tencent have it."""

from __future__ import annotations

from spotsafe.clock import Clock
from spotsafe.reclaim.http import Reply
from spotsafe.reclaim.notice import NoticeKind, ReclaimNotice, deadline_after
from spotsafe.reclaim.times import server_time


class TerminationTime:
    """Turns its answers into notices. A deadline counts from the first time that an answer came.

    Args:
        source: the watcher's name.
        clock: for deadlines.
        longest_s: seconds that the service is ever ahead.
        stale_after_s: a time that is longer past than this when it is first seen was not carried out.
    """

    def __init__(self, source: str, *, clock: Clock, longest_s: float, stale_after_s: float = 120.0) -> None:
        self._source, self._clock = source, clock
        self._longest_s, self._stale_after_s = longest_s, stale_after_s
        self._known: tuple[float, ReclaimNotice | None] | None = None

    def nothing(self) -> None:
        """The key is not there: what it said before is withdrawn."""
        self._known = None

    def at(self, wall_s: float, reply: Reply) -> ReclaimNotice | None:
        """What it means that the machine goes at a time, in seconds since 1970, by the clock of the answer."""
        if self._known is None or self._known[0] != wall_s:
            self._known = wall_s, self._notice(wall_s - server_time(reply, else_=self._clock.wall()))
        return self._known[1]

    def _notice(self, left_s: float) -> ReclaimNotice | None:
        if left_s < -self._stale_after_s:
            return None
        now = self._clock.monotonic()
        deadline = deadline_after(left_s, now=now, at_most=self._longest_s)
        return ReclaimNotice(
            source=self._source, kind=NoticeKind.RECLAIM, action="terminate", deadline=deadline, received=now
        )
