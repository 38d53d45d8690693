"""The example programs: what a reader would try first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--layers", "1", "--width", "32", "--batch-size", "2", "--workers", "0")


def train(folder: Path, name: str, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
    """Run an example in a folder; its output and its whole trace so far."""
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *SMALL, "--trace", "trace", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result, [json.loads(line) for line in (folder / "trace").read_text().splitlines()]


def test_both_fit_on_a_few_screens():
    """An example is read, not only run."""
    for name in ("train_gpt.py", "train_gpt_plain.py"):
        assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < 150


@pytest.mark.slow
def test_the_plain_program_trains(tmp_path):
    """It prints the text's digest, and writes a line for each step."""
    result, trace = train(tmp_path, "train_gpt_plain.py", "--steps", "3")

    assert "sha256" in result.stdout.splitlines()[0]
    assert [line["step"] for line in trace] == [0, 1, 2]
    assert all(len(line["ids"]) == 2 for line in trace)
    assert float.fromhex(trace[0]["loss"]) > 4


@pytest.mark.slow
def test_the_same_command_again_does_nothing_and_a_larger_one_goes_on(tmp_path):
    """A finished run says so; more steps continue where it ended."""
    train(tmp_path, "train_gpt.py", "--steps", "3")
    again, trace = train(tmp_path, "train_gpt.py", "--steps", "3")

    assert [line["step"] for line in trace] == [0, 1, 2]
    assert "finished" in again.stderr

    _, trace = train(tmp_path, "train_gpt.py", "--steps", "5")
    assert [line["step"] for line in trace] == [0, 1, 2, 3, 4]
    assert len({number for line in trace for number in line["ids"]}) == 10


@pytest.mark.slow
def test_it_says_three_lines(tmp_path):
    """Where it starts, how often it saves, how it ended; and nothing else on standard error."""
    result, _ = train(tmp_path, "train_gpt.py", "--steps", "2")

    lines = result.stderr.splitlines()
    assert len(lines) == 3, result.stderr
    assert "fresh start" in lines[0]
    assert "every 100 steps" in lines[1]
    assert "finished" in lines[2]
