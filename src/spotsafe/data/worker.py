"""What a worker process of our loader does first."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from torch.utils.data import get_worker_info

from spotsafe.data.seeding import SeededDataset

_POLL_S = 1.0
_HELD = frozenset({signal.SIGTERM})


@contextlib.contextmanager
def starting_workers() -> Iterator[None]:
    """Around the start of workers: SIGTERM to the trainer's group does not kill one that is not out of it yet.

    A worker inherits that the signal waits, and `WorkerInit` ends it. The trainer hears of a signal all the same:
    by another thread at once, or at the end of the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True, slots=True)
class WorkerInit:
    """The `worker_init_fn` of the inner loader. A class, not a closure: spawned workers get it by pickle.

    The worker goes into a process group of its own: launchers signal the whole group of the training process, and
    a worker that dies of it makes DataLoader raise at an arbitrary place, inside a save too. It handles signals
    as before; ignoring SIGTERM would hang DataLoader's own shutdown.

    It ends when the training process does, however that ends. Torch's own watch leaves a worker behind for ever
    when the queue to the dead process is full.

    Attributes:
        trainer: the process that fetches from the workers.
        user_fn: the user's own `worker_init_fn`, called last.
    """

    trainer: int
    user_fn: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        """Set up this process as a worker."""
        os.setpgid(0, 0)
        _forget_signals_to_the_group()
        threading.Thread(
            target=_end_with, args=(self.trainer,), daemon=True, name="spotsafe-parent-watch"
        ).start()
        info = get_worker_info()
        if info is not None:
            # Here users look for their dataset. WorkerInfo's own __setattr__ refuses in some versions.
            object.__setattr__(info, "dataset", cast("SeededDataset", info.dataset).dataset)
        if self.user_fn is not None:
            self.user_fn(worker_id)


def _forget_signals_to_the_group() -> None:
    """Drop what has come since the fork, and receive signals from now on. Handlers stay: torch has one here."""
    if _HELD & signal.sigpending():
        signal.sigwait(_HELD)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)


def _end_with(pid: int) -> None:
    """Leave this process, without any clean-up, once the process `pid` has gone."""
    _wait_for_end(pid)
    os._exit(1)


def _wait_for_end(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux, or forbidden here
        _poll_for_end(pid)
        return
    try:
        ended = select.poll()  # not select.select, which refuses descriptors above 1023
        ended.register(handle, select.POLLIN)
        ended.poll()
    finally:
        os.close(handle)


def _poll_for_end(pid: int) -> None:
    """A process that was killed but not reaped still exists; its children show it by having another parent."""
    parent = os.getppid()
    while _exists(pid) and os.getppid() == parent:
        time.sleep(_POLL_S)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
