"""Which writer a session has: a process of its own where that can be, else a thread."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from spotsafe.checkpoint.markers import EndedAt
from spotsafe.clock import SystemClock
from spotsafe.events import Event, Warned
from spotsafe.identity import Identity
from spotsafe.options import Options
from spotsafe.storage.open import Reopening
from spotsafe.storage.store import Store
from spotsafe.writer import wire
from spotsafe.writer.process import ProcessWriter, can_run
from spotsafe.writer.thread import WriterThread

Writer = WriterThread | ProcessWriter

_log = logging.getLogger(__name__)


def choose_writer(
    store: Store,
    where: Reopening | None,
    *,
    options: Options,
    identity: Identity,
    emit: Callable[[Event], object],
    ended: Callable[[int], bool] | None,
    ended_at: EndedAt,
) -> Writer:
    """The writer that ``writer=`` asks for, or the thread, and then it is said why.

    Args:
        store: the run.
        where: how another process opens it; None if it cannot.
        options: of the session.
        identity: of this process.
        emit: is told of everything that happens.
        ended: see `Uploader`.
        ended_at: see `Uploader`.
    """
    why = "it was asked for" if options.writer == "thread" else _why_not(where, options)
    if why is None:
        assert where is not None, "else there is a reason"
        try:
            writer = ProcessWriter(
                store,
                where,
                emit=emit,
                clock=options.clock,
                identity=identity,
                ended=ended,
                ended_at=ended_at,
            )
        except (OSError, RuntimeError, MemoryError, ValueError) as error:
            why = str(error) or type(error).__name__
            emit(Warned(message=f"no writer process can be started, a thread writes: {why}"))
        else:
            _say_first_process(emit)
            return writer
    elif options.writer == "process":
        emit(Warned(message=f"a thread writes instead of a process: {why}"))
    _log.info("saves are written by a thread: %s", why)
    return WriterThread(store, emit=emit, clock=options.clock, ended=ended, ended_at=ended_at)


def _why_not(where: Reopening | None, options: Options) -> str | None:
    """What keeps another process from writing; None if nothing does."""
    if not can_run():
        return "this system has no memory that two processes can share by a descriptor, or no Python to run by itself"
    if where is None:
        return "only this process can open the store"
    if wire.policies_of(options.keep) is None:
        return f"keep={options.keep!r} is a policy of the program's own"
    if type(options.clock) is not SystemClock:
        return "the session has a clock of its own"
    return None


def _say_first_process(emit: Callable[[Event], object]) -> None:
    """The kernel ends a whole pid namespace with its first process, the writer too."""
    if os.getpid() == 1:
        emit(
            Warned(
                message="this process is the first one of its container (PID 1): if it is killed, the writer process "
                "ends with it, and a save that is not published yet is lost. An init process (docker run --init, "
                "tini) in front of it avoids this"
            )
        )
