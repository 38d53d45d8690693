"""Watching, killing and waiting for a training process, tried on one that a test controls by files."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from spotsafe.cli import demo_process
from spotsafe.cli.demo_process import DemoFailed, Training, plain_environment

# Does one step for each line of its orders: a number is the exit status, "step" a step, "half" a torn line.
SCRIPT = """
import argparse, json, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--orders", type=pathlib.Path)
parser.add_argument("--trace")
options = parser.parse_args()
print("hello from the script", flush=True)
done = 0
while True:
    orders = options.orders.read_text().split()
    if len(orders) == done:
        time.sleep(0.002)
        continue
    order, number, done = orders[done], done, done + 1
    if order.isdigit():
        sys.exit(int(order))
    line = json.dumps({"step": number, "loss": "0x1p+0", "ids": [number], "time": time.time()}) + "\\n"
    with open(options.trace, "a") as file:
        file.write(line if order == "step" else line[:9])
"""


@pytest.fixture
def start(tmp_path):
    """Start the script with these first orders; more are given by writing to `orders`."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def begin(orders: str, on_step=lambda step: None) -> Training:
        (tmp_path / "orders").write_text(orders)
        return Training(
            [str(script), "--orders", str(tmp_path / "orders")],
            folder=tmp_path,
            name="attempt",
            environ=plain_environment({}),
            on_step=on_step,
        )

    return begin


def test_waits_for_a_step_and_for_the_end(start, tmp_path):
    """Steps are told as they are done, and the exit status is that of the process."""
    told: list[int] = []
    with start("step step", told.append) as training:
        training.wait_for_step(1)
        (tmp_path / "orders").write_text("step step step 7")

        assert training.wait_for_end() == 7

    assert told == [0, 1, 2]
    assert [step.ids for step in training.steps] == [(0,), (1,), (2,)]
    assert training.first_step_s is not None
    assert 0 < training.first_step_s < 60


def test_a_process_that_ends_too_early_is_shown_with_its_output(start):
    """Nobody should have to look for the log to learn why."""
    with start("step 3") as training, pytest.raises(DemoFailed) as caught:
        training.wait_for_step(5)

    assert "ended with status 3 before step 5" in caught.value.message
    assert "hello from the script" in caught.value.message


def test_a_process_that_hangs_is_given_up(start, monkeypatch):
    """Without a new step the wait ends, with the last output; the process is not left behind."""
    monkeypatch.setattr(demo_process, "PATIENCE_S", 0.2)
    with start("step") as training, pytest.raises(DemoFailed) as caught:
        training.wait_for_end()

    assert "no step for" in caught.value.message


def test_kills_in_the_middle_of_a_step(start):
    """SIGKILL, half a usual step after the last one."""
    with start("step step step") as training:
        training.wait_for_step(2)
        half = training.kill_in_step()

        assert training.wait_for_end() == -signal.SIGKILL

    assert 0 <= half < 30
    assert len(training.steps) == 3


def test_a_torn_last_line_is_not_read(start):
    """A line that was being written when the process died is no step."""
    with start("step half 0") as training:
        training.wait_for_end()

    assert [step.step for step in training.steps] == [0]


def test_leaving_kills_what_still_runs(start):
    """An error in between leaves no process behind."""
    with pytest.raises(KeyboardInterrupt), start("") as training:
        raise KeyboardInterrupt

    assert training.wait_for_end() == -signal.SIGKILL


def test_launchers_and_clouds_do_not_show_through(monkeypatch):
    """The demo trains one process alone, whoever started it."""
    for name in ("SLURM_JOB_ID", "RANK", "SPOTSAFE_NOTICE_FILE", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "1")

    environ = plain_environment({"ADDED": "2"})

    assert (environ["KEPT"], environ["ADDED"]) == ("1", "2")
    assert not {"SLURM_JOB_ID", "RANK", "SPOTSAFE_NOTICE_FILE", "AWS_EC2_METADATA_DISABLED"} & environ.keys()


def test_every_process_adds_with_the_same_number_of_threads(monkeypatch):
    """One process that finds another number of threads would differ in the last bits; who sets a number keeps it."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    fixed = plain_environment({})
    monkeypatch.setenv("OMP_NUM_THREADS", "3")

    assert fixed["OMP_NUM_THREADS"] == "1"
    assert plain_environment({})["OMP_NUM_THREADS"] == "3"


def test_the_script_runs_under_this_interpreter(start, tmp_path):
    """Reference and resumed runs must read the same standard library."""
    (tmp_path / "script.py").write_text("import sys; print(sys.executable)")
    with start("") as training:
        training.wait_for_end()

    assert Path(training.log.read_text().strip()) == Path(sys.executable)
