"""Keeps the death of a child from interrupting a save.

PyTorch's DataLoader installs a Python handler for SIGCHLD that raises RuntimeError when one of its workers
has died (torch/utils/data/_utils/signal_handling.py). The handler runs between any two bytecodes of the main
thread, inside a save too, and on a reclaim workers die first: launchers signal the whole process group.
Blocking the signal is not enough, as another thread takes it and the handler still runs in the main thread.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_Handler = Callable[[int, "FrameType | None"], object]


@contextlib.contextmanager
def child_deaths_deferred() -> Iterator[None]:
    """Hold back a Python handler of SIGCHLD for the duration of the block; does nothing off the main thread.

    When children died meanwhile, a handler of the user's own is called once at the end, as for any burst of
    signals: a reaper must not be left with zombies. DataLoader's is not: its only effect would be to raise
    here, and the loader finds the dead worker by itself when it next waits for a batch. Handlers that are not
    Python's, and the default, have no way to interrupt and are left alone.

    An error that the handler raises for a death just before the block is held back, too, and raised at its
    end unless the block raises one of its own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGCHLD)
    if not callable(handler):
        yield
        return
    deferral = _Deferral(handler)
    early = deferral.begin()
    try:
        yield
    finally:
        deferral.end()
    if early is not None:
        raise early


class _Deferral:
    """Stands in for a handler. A Python handler itself, so that wakeup descriptors still get the signal."""

    def __init__(self, handler: _Handler) -> None:
        self._handler = handler
        self._stand_in = self._note  # one object for good: handlers are compared by identity
        self._pending = False
        self._over = False

    def begin(self) -> RuntimeError | None:
        """Stand in from now on.

        Returns:
            What the old handler raised, if a signal was waiting for it: exchanging handlers runs it first.
        """
        try:
            signal.signal(signal.SIGCHLD, self._stand_in)
        except RuntimeError as error:
            signal.signal(signal.SIGCHLD, self._stand_in)
            return error
        return None

    def end(self) -> None:
        """Put the handler back, unless another one has been installed on top, and tell it what it missed."""
        if signal.getsignal(signal.SIGCHLD) is self._stand_in:
            signal.signal(signal.SIGCHLD, self._handler)
        self._over = True
        if self._pending and not _raises_in_main_thread(self._handler):
            self._handler(signal.SIGCHLD, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._over:
            self._handler(number, frame)
            return
        self._pending = True


def _raises_in_main_thread(handler: object) -> bool:
    """Whether this is DataLoader's handler, recognized without importing torch."""
    return str(getattr(handler, "__module__", "")).startswith("torch.utils.data.")
