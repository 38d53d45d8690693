"""Dying at a chosen event: exactly there, and with the script run as it would be alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spotsafe.events import EventSink, FileWritten, IndexWritten
from spotsafe.identity import is_running
from spotsafe.testing.killing import KillAt, kill_machine
from spotsafe.testing.sinks import EventSinkConformance
from tests.e2e.processes import until

WRITTEN = FileWritten(checkpoint="c", file="data-00000-000.safetensors", total_bytes=1)

EMITTING = """
import sys
from spotsafe import events

for number in range(int(sys.argv[1])):
    print("before", number, flush=True)
    for sink in events.installed():
        sink.emit(events.FileWritten(checkpoint="c", file="f", total_bytes=1))
print("end", flush=True)
"""


def run_killing(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spotsafe.testing.killing", *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=60,
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(EMITTING)
    return path


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What would have been sent."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    return sent


def test_a_machine_goes_with_all_its_processes() -> None:
    """Of all that it started nothing goes on."""
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        kill_machine(parent.pid)
        assert parent.wait(60) == -signal.SIGKILL
        until(lambda: not is_running(child), what="the child is gone")


class TestKillAt(EventSinkConformance):
    """A sink like any other, as long as its event does not come."""

    def make_sink(self) -> EventSink:
        return KillAt("FileWritten", count=10**9)


def test_it_kills_at_the_counted_event_and_only_there(signals: list[tuple[int, int]]) -> None:
    """Other events do not count, and later ones of the type do nothing more."""
    sink = KillAt("FileWritten", count=2, signum=signal.SIGTERM)

    sink.emit(WRITTEN)
    sink.emit(IndexWritten(checkpoint="c", file="f"))
    assert (signals, sink.fired) == ([], False)

    sink.emit(WRITTEN)
    assert (signals, sink.fired) == ([(os.getpid(), signal.SIGTERM)], True)

    sink.emit(WRITTEN)
    assert len(signals) == 1


@pytest.mark.parametrize("name", ["FileWriten", "", "Fanout", "Event", "install", "logging"])
def test_a_name_that_is_no_event_is_refused(name: str) -> None:
    """A misspelt event would never kill, and the test would prove nothing."""
    with pytest.raises(ValueError, match="no event"):
        KillAt(name)


@pytest.mark.parametrize("count", [0, -1])
def test_events_are_counted_from_one(count: int) -> None:
    """The zeroth event does not come."""
    with pytest.raises(ValueError, match="from 1"):
        KillAt("FileWritten", count=count)


def test_the_process_dies_at_once(script: Path) -> None:
    """SIGKILL at the second event: nothing after it runs."""
    ended = run_killing("--at", "FileWritten:2", "--", str(script), "5", cwd=script.parent)

    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout.split("\n") == ["before 0", "before 1", ""]


def test_another_signal(script: Path) -> None:
    """The signal can be chosen."""
    ended = run_killing(
        "--at", "FileWritten", "--signal", "SIGTERM", "--", str(script), "3", cwd=script.parent
    )

    assert ended.returncode == -signal.SIGTERM
    assert ended.stdout.split() == ["before", "0"]


def test_a_script_that_ends_first_says_so(script: Path) -> None:
    """Its own exit code is kept, and a line on stderr says that nothing was killed."""
    ended = run_killing("--at", "FileWritten:9", "--", str(script), "3", cwd=script.parent)

    assert ended.returncode == 0
    assert ended.stdout.endswith("end\n")
    assert "ended before FileWritten:9" in ended.stderr


def test_the_script_runs_as_if_alone(tmp_path: Path) -> None:
    """Arguments, __main__, its own folder for imports and its exit code are those of `python script.py`."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "helper.py").write_text("NAME = 'beside the script'\n")
    (folder / "train.py").write_text(
        "import json, sys, helper\n"
        "class Local: pass\n"
        "print(json.dumps([__name__, __file__, sys.argv, helper.NAME, sys.path[0], Local.__module__,\n"
        "    sys.modules['__main__'].Local is Local]))\n"
        "sys.exit(7)\n"
    )
    train = str(folder / "train.py")

    ended = run_killing("--at", "RunEnded", "--", train, "--lr", "0.1", "--at", "x", cwd=tmp_path)
    alone = subprocess.run(
        [sys.executable, train, "--lr", "0.1", "--at", "x"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )

    assert ended.returncode == alone.returncode == 7
    assert json.loads(ended.stdout) == json.loads(alone.stdout)


def test_an_error_of_the_script_is_its_own(tmp_path: Path) -> None:
    """The traceback is shown and the exit code is 1."""
    (tmp_path / "train.py").write_text("raise RuntimeError('out of luck')\n")

    ended = run_killing("--at", "RunEnded", "--", "train.py", cwd=tmp_path)

    assert ended.returncode == 1
    assert "RuntimeError: out of luck" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--at", "Nothing:1", "--", "x.py"], "no event 'Nothing'"),
        (["--at", "FileWritten:0", "--", "x.py"], "counted from 1"),
        (["--at", "FileWritten:two", "--", "x.py"], "invalid literal"),
        (["--at", "FileWritten", "--signal", "SIGFOO", "--", "x.py"], "no such signal: SIGFOO"),
        (["--at", "FileWritten"], "no script"),
        (["--", "x.py"], "--at"),
    ],
)
def test_wrong_options_are_explained(arguments: list[str], message: str, tmp_path: Path) -> None:
    """A mistake ends with code 2 before the script runs."""
    ended = run_killing(*arguments, cwd=tmp_path)

    assert ended.returncode == 2
    assert message in ended.stderr
