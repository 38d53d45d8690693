"""Leaves a reclaimed process in the way that its launcher needs; when everything is saved and closed.

At the exit of the interpreter, behind what the program itself still does: signals end the process again by then.

The agent of torchrun starts each rank in a session of its own (``start_new_session``, in the subprocess handler of
``torch/distributed/elastic/multiprocessing``), so that the agent is the parent of the session's leader, also where a
shell or a wrapper stands between it and this process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading

from spotsafe.clock import Clock
from spotsafe.policy.leaving import AGENT_S, Leaving


def leave_at_exit(leaving: Leaving, *, clock: Clock) -> None:
    """Have this process leave so when it exits, if that takes any time at all."""
    atexit.unregister(leave)  # of an earlier run of the same process
    if leaving.limit_s:
        atexit.register(leave, leaving, clock=clock, process=os.getpid())


def leave(leaving: Leaving, *, clock: Clock, process: int | None = None) -> None:
    """Wait to be killed, as far as that is the way out; returns if nobody did.

    Args:
        leaving: how.
        clock: waits.
        process: does nothing in another one than this: a child that was forked exits through the same doors.
    """
    if process is not None and os.getpid() != process:
        return
    never = threading.Event()
    if leaving.wait_s:
        clock.wait(never, leaving.wait_s)
    if leaving.ask_agent and ask_agent():
        clock.wait(never, AGENT_S)


def ask_agent() -> bool:
    """Ask the agent that started this process's session to end; false if there is none to be asked."""
    agent = agent_pid()
    if agent is None:
        return False
    with contextlib.suppress(OSError):
        os.kill(agent, signal.SIGTERM)
        return True
    return False


def agent_pid() -> int | None:
    """The parent of the leader of this process's session; None if that is nobody who could have started it."""
    leader = os.getsid(0)
    parent = os.getppid() if leader == os.getpid() else _parent_of(leader)
    return parent if parent is not None and parent > 1 else None


def _parent_of(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
