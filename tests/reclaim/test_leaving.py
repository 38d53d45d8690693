"""A reclaimed process waits for its end, and asks torchrun's agent for it; a child that it forked does neither."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spotsafe.policy.leaving import AGENT_S, Leaving
from spotsafe.reclaim import leaving
from spotsafe.reclaim.leaving import agent_pid, ask_agent, leave


class Waits:
    """A clock that notes how long it is to wait."""

    def __init__(self) -> None:
        self.waited: list[float] = []

    def monotonic(self) -> float:
        return 0.0

    def wall(self) -> float:
        return 0.0

    def wait(self, event: object, seconds: float | None) -> bool:
        self.waited.append(seconds or 0.0)
        return False


def test_it_waits_as_long_as_it_was_told() -> None:
    """And returns, if nobody ended it."""
    clock = Waits()
    leave(Leaving(wait_s=7), clock=clock)
    assert clock.waited == [7]


@pytest.mark.parametrize("there_is_one", [True, False])
def test_the_agent_gets_time_to_end_it(there_is_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """None where there is nobody to ask."""
    monkeypatch.setattr(leaving, "ask_agent", lambda: there_is_one)
    clock = Waits()
    leave(Leaving(wait_s=7, ask_agent=True), clock=clock)
    assert clock.waited == ([7, AGENT_S] if there_is_one else [7])


def test_another_process_does_nothing() -> None:
    """A forked child goes out through the same doors."""
    clock = Waits()
    leave(Leaving(wait_s=7), clock=clock, process=os.getpid() + 1)
    assert clock.waited == []


def test_one_that_is_gone_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No error on the way out."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    monkeypatch.setattr(leaving, "agent_pid", lambda: child.pid)
    assert ask_agent() is False


def test_init_is_nobodys_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose parent has gone belongs to it."""
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert agent_pid() is None


AGENT = """
import signal, subprocess, sys
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
child = subprocess.Popen(sys.argv[1:], start_new_session=True)
code = child.wait()
sys.exit(40 + len(asked) if code == 0 else code)
"""
ASK = "from spotsafe.reclaim.leaving import ask_agent; raise SystemExit(0 if ask_agent() else 9)"


@pytest.mark.parametrize("wrapper", [[], ["sh", "-c", '"$@"; exit $?', "sh"]], ids=["itself", "by a shell"])
def test_the_agent_is_who_made_the_session(wrapper: list[str]) -> None:
    """Also where a shell stands between the two."""
    done = subprocess.run([sys.executable, "-c", AGENT, *wrapper, sys.executable, "-c", ASK], check=False)
    assert done.returncode == 41


def test_at_exit_behind_what_the_program_does(tmp_path: Path) -> None:
    """Its own last lines run; a signal then ends it, and a child that it forked has left at once."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from spotsafe.clock import SystemClock\n"
        "from spotsafe.policy.leaving import Leaving\n"
        "from spotsafe.reclaim.leaving import leave_at_exit\n"
        "leave_at_exit(Leaving(wait_s=1000), clock=SystemClock())\n"
        "leave_at_exit(Leaving(wait_s=2000), clock=SystemClock())\n"
        "if os.fork() == 0: sys.exit(0)\n"
        "os.wait()\n"
        "print('last line', flush=True)\n"
        "sys.exit(143)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "last line\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


def test_nothing_is_done_where_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    """The exit code is the program's; what an earlier run wanted is forgotten."""
    script = (
        "import sys\n"
        "from spotsafe.clock import SystemClock\n"
        "from spotsafe.policy.leaving import Leaving\n"
        "from spotsafe.reclaim.leaving import leave_at_exit\n"
        "leave_at_exit(Leaving(wait_s=1000), clock=SystemClock())\n"
        "leave_at_exit(Leaving(), clock=SystemClock())\n"
        "sys.exit(143)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 143
