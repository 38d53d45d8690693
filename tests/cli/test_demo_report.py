"""How the demo tells what came out."""

from __future__ import annotations

import json

import pytest

from spotsafe.cli.demo_compare import Check, Step
from spotsafe.cli.demo_report import Lines, print_report, progress, report, status_text, steps_lost
from spotsafe.cli.demo_story import Attempt


def attempt(first: int, last: int, *, status: int = 0, problem: str = "") -> Attempt:
    steps = tuple(Step(step=n, loss="0x0", ids=(n,), time=float(n)) for n in range(first, last + 1))
    return Attempt(
        what="SIGKILL in a step",
        event="somewhere",
        status=status,
        problem=problem,
        steps=steps,
        first_step_s=2.5,
    )


GOOD = Check(what="weights", equal=True, detail="3 tensors")
BAD = Check(what="optimizer", equal=False, detail="differs at optimizer.lr")


def test_steps_lost():
    """Steps that two attempts both did were lost by the first; none if the second goes on behind it."""
    assert steps_lost(attempt(0, 9), attempt(5, 12)) == 5
    assert steps_lost(attempt(0, 9), attempt(10, 12)) == 0
    assert steps_lost(attempt(0, 9), None) is None


@pytest.mark.parametrize(("status", "text"), [(0, "0"), (143, "143"), (-9, "SIGKILL")])
def test_exit_status_in_words(status, text):
    """A signal is shown by its name."""
    assert status_text(status) == text


def test_for_programs():
    """Everything in the tables is in the JSON too, and it says both verdicts."""
    attempts = [attempt(0, 9, status=-9), attempt(5, 19)]

    answer = json.loads(json.dumps(report(attempts, [GOOD, BAD], seconds=12.34)))

    assert (answer["identical"], answer["as_planned"], answer["seconds"]) == (False, True, 12.3)
    assert answer["attempts"][0] == {
        "what": "SIGKILL in a step",
        "event": "somewhere",
        "exit_status": -9,
        "problem": "",
        "first_step": 0,
        "last_step": 9,
        "steps_lost": 5,
        "seconds_to_first_step": 2.5,
    }
    assert answer["checks"][1] == {"what": "optimizer", "equal": False, "detail": "differs at optimizer.lr"}


def test_for_people_when_all_is_well(capsys):
    """Two tables and a verdict."""
    print_report([attempt(0, 9, status=-9), attempt(5, 19)], [GOOD], seconds=61.0)

    out = capsys.readouterr().out
    assert "SIGKILL in a step  SIGKILL" in out
    assert "identical" in out
    assert out.endswith("1 interruption, 61 s in all: as if nothing had happened.\n")


def test_for_people_when_it_is_not(capsys):
    """A difference, or an unplanned exit status, cannot be overlooked."""
    print_report([attempt(0, 9, status=1, problem="exit status 143 was expected")], [GOOD], seconds=1.0)
    print_report([attempt(0, 9), attempt(5, 19)], [BAD], seconds=1.0)

    out = capsys.readouterr().out
    assert "NOT AS PLANNED: exit status 143 was expected; somewhere" in out
    assert "DIFFERENT" in out
    assert out.count("NOT as if nothing had happened") == 2


def test_progress_in_a_pipe_is_lines_on_stderr(capsys):
    """A log shows what is going on without bars."""
    with progress(steps=10) as audience:
        audience.begin("reference")
        audience.step(3)
        audience.end("10 steps")

    captured = capsys.readouterr()
    assert isinstance(audience, Lines)
    assert captured.out == ""
    assert captured.err == "reference ...\n  10 steps\n"


def test_progress_on_a_terminal_is_bars(monkeypatch):
    """A terminal shows how far each process is."""
    import contextlib
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with contextlib.redirect_stderr(Terminal()) as stream, progress(steps=10) as audience:
        audience.begin("reference")
        audience.step(9)
        audience.end("ten steps")

    assert "reference" in stream.getvalue()
    assert "10/10" in stream.getvalue()
    assert "ten steps" in stream.getvalue()
