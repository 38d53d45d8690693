"""A file whose existence is the notice: for schedulers and clouds without a source of their own."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping

from spotsafe.clock import Clock, SystemClock
from spotsafe.errors import WatcherUnavailable
from spotsafe.reclaim.notice import NoticeKind, ReclaimNotice, deadline_after

ENVIRONMENT_VARIABLE = "SPOTSAFE_NOTICE_FILE"
"""Names the file to watch."""
LONGEST_NOTICE_S = 3600.0
"""Seconds that a file can promise at most; more is taken as this."""
_MOST_BYTES = 65536


def from_environment(environ: Mapping[str, str], *, clock: Clock) -> FileWatcher | None:
    """The watcher that `SPOTSAFE_NOTICE_FILE` asks for, if it is set."""
    path = environ.get(ENVIRONMENT_VARIABLE, "").strip()
    return FileWatcher(path, clock=clock) if path else None


class FileWatcher:
    """Watches for a file.

    The file may be empty, hold a number (seconds from its modification time to the end), or JSON like
    ``{"deadline_s": 30, "action": "terminate"}``. Content that cannot be understood is ignored, as a file may
    be read while it is being written: that the file exists is the notice, and it is never lost over its
    content. Deleting the file cancels the notice.

    A file that is there when watching starts counts too. The node may have been told before this process
    started, and training into a known end would lose work. Only a file older than the machine's boot is
    ignored: it announced the end of an earlier life of the machine, and would stop every start from then on.
    """

    name = "file"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
        interval_s: float = 1.0,
        booted: float | None = None,
    ) -> None:
        """Watch `path`.

        Args:
            path: the file; neither it nor its folder need exist.
            clock: for the deadline.
            interval_s: seconds between two looks.
            booted: when the machine booted, in seconds of `Clock.wall`; None asks the kernel.
        """
        self.interval_s = interval_s
        self._path = os.fspath(path)
        self._clock: Clock = SystemClock() if clock is None else clock
        self._booted = _boot_time() if booted is None else booted
        self._seen: tuple[int, int, int] | None = None
        self._notice: ReclaimNotice | None = None

    def poll(self) -> ReclaimNotice | None:
        """Look once.

        Raises:
            WatcherUnavailable: the path cannot be looked at (permissions, a dead network mount).
        """
        try:
            stat = os.stat(self._path)
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if seen != self._seen or self._notice is None:
                self._notice = self._read(modified=stat.st_mtime)
                self._seen = seen
        except FileNotFoundError:
            self._notice = self._seen = None
        except OSError as error:
            raise WatcherUnavailable(
                f"cannot look at the notice file {self._path}: {error.strerror or error}; "
                f"check {ENVIRONMENT_VARIABLE} and the permissions of the path",
                source=self.name,
            ) from error
        return self._notice

    def close(self) -> None:
        """Nothing is held between two looks."""

    def _read(self, *, modified: float) -> ReclaimNotice | None:
        if modified < self._booted:
            return None
        with open(self._path, "rb") as file:
            seconds, action = _parse(file.read(_MOST_BYTES))
        now = self._clock.monotonic()
        if seconds is None:
            deadline = None
        else:
            age = max(0.0, self._clock.wall() - modified)
            deadline = deadline_after(seconds - age, now=now, at_most=LONGEST_NOTICE_S)
        received = now if self._notice is None else self._notice.received
        return ReclaimNotice(
            source=self.name, kind=NoticeKind.RECLAIM, action=action, deadline=deadline, received=received
        )


def _parse(content: bytes) -> tuple[float | None, str]:
    """Seconds and action of a file's content; None and "reclaim" where it does not say."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None, "reclaim"
    if not isinstance(value, dict):
        return _seconds(value), "reclaim"
    action = value.get("action")
    return _seconds(value.get("deadline_s")), action if isinstance(action, str) and action else "reclaim"


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        seconds = float(value)
    except OverflowError:
        return LONGEST_NOTICE_S if value > 0 else 0.0
    return None if math.isnan(seconds) else seconds


def _boot_time() -> float:
    """When this machine booted, in wall seconds; 0 (nothing is older) where the kernel does not tell."""
    try:
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    except (AttributeError, OSError):
        return 0.0
