"""How much of a checkpoint has been read, told by the thread that waits for those that read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from spotsafe.clock import Clock
from spotsafe.events import Event, RestoreProgress
from spotsafe.telling import Telling

_LOOK_S = 1.0


class ReadProgress:
    """Counts what is read and tells of it every few seconds, also when nothing moves, until a ``with`` block ends.

    Args:
        checkpoint: its name.
        total_bytes: what is to be read.
        emit: is told, by the thread that waits.
        clock: measures, and waits.
    """

    def __init__(
        self, checkpoint: str, total_bytes: int, *, emit: Callable[[Event], object], clock: Clock
    ) -> None:
        self._checkpoint, self._total_bytes, self._clock = checkpoint, total_bytes, clock
        self._lock = threading.Lock()
        self._read_bytes = 0
        self._telling = Telling(self._event, emit=emit, clock=clock)

    def __enter__(self) -> ReadProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._telling.__exit__(kind, error, trace)

    def add(self, nbytes: int) -> None:
        """So much more is read and verified. From any thread."""
        with self._lock:
            self._read_bytes += nbytes

    def wait_for(self, job: Future[Any]) -> None:
        """Return when it has ended, however."""
        if not job.done():
            ended = threading.Event()
            job.add_done_callback(lambda _: ended.set())
            while not self._clock.wait(ended, _LOOK_S):
                self._telling.look()
        self._telling.look()

    def _event(self, waited_s: float, over: bool) -> RestoreProgress:
        return RestoreProgress(
            checkpoint=self._checkpoint,
            waited_s=waited_s,
            read_bytes=self._read_bytes,
            total_bytes=self._total_bytes,
            over=over,
        )
