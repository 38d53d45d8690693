"""The processes of these tests are real, and what becomes of them is told right."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.processes import ONE_THREAD, Launcher, members, until

pytestmark = pytest.mark.slow


def test_a_forked_child_is_a_process_of_its_own(launcher: Launcher, tmp_path: Path) -> None:
    """It leads its session, has no descriptor of the server's, and ends with the script's own status."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, threading\n"
        "print(os.getpid(), os.getsid(0), os.getpgrp(), sorted(map(int, os.listdir('/proc/self/fd')))[:3],\n"
        "    len(os.listdir('/proc/self/fd')), threading.active_count(), sys.argv, os.environ['WORD'], __name__)\n"
        "sys.exit(7)\n"
    )
    log = tmp_path / "log"
    process = launcher.fork(script, log=log, environment={"WORD": "hello"})
    assert process.end() == 7
    pid = process.pid
    expected = (
        f"{pid} {pid} {pid} [0, 1, 2] 4 1 {[str(script)]} hello __main__\n"  # the fourth is the listing's own
    )
    assert log.read_text() == expected


def test_the_way_a_child_ends_is_told(launcher: Launcher, tmp_path: Path) -> None:
    """A signal, an exception, and a message as exit status are told apart as the interpreter does it."""
    script = tmp_path / "script.py"
    for text, status in (
        (f"import os\nos.kill(os.getpid(), {int(signal.SIGKILL)})", -signal.SIGKILL),
        ("raise ValueError('odd')", 1),
        ("raise SystemExit('in words')", 1),
        ("raise SystemExit", 0),
        ("import os\nos._exit(9)", 9),
    ):
        script.write_text(text)
        assert launcher.fork(script, log=tmp_path / "log", environment={}).end() == status
    assert "ValueError: odd" in (tmp_path / "log").read_text()
    assert "in words" in (tmp_path / "log").read_text()


def test_members_of_a_session(launcher: Launcher, tmp_path: Path) -> None:
    """A process and what it started are found, whatever their process groups, until they are gone."""
    script = tmp_path / "script.py"
    script.write_text("import os, time\nif os.fork() == 0:\n    os.setpgid(0, 0)\ntime.sleep(600)\n")
    process = launcher.fork(script, log=tmp_path / "log", environment={})
    found = until(lambda: members(process.pid)[1:] and members(process.pid), what="the child of the child")
    assert found[0] == process.pid
    assert process.kill() == -signal.SIGKILL
    assert members(process.pid) == found[1:]
    os.kill(found[1], signal.SIGKILL)
    until(lambda: not members(process.pid), what="the end of all")


def test_waiting_for_what_never_comes_ends() -> None:
    """With an error that says what was waited for."""
    with pytest.raises(TimeoutError, match="the moon"):
        until(lambda: False, what="the moon", patience_s=0.01)


def test_one_thread_everywhere() -> None:
    """Sums must not depend on how many cores a machine has."""
    assert set(ONE_THREAD.values()) == {"1"}
