"""SIGTERM three times, in a real process whose body never ends: it leaves, and loses nothing that was published."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import spotsafe
from spotsafe.ledger.reading import read_end
from spotsafe.storage.open import open_store

PROGRAM = """
import sys, time
import torch
import spotsafe
from spotsafe.reclaim import signals

signals.ECHO_S = 0.0


class Told:
    def emit(self, event):
        if isinstance(event, spotsafe.events.NoticeReceived):
            print("noticed", flush=True)


model = torch.nn.Linear(1, 1)
with spotsafe.session(sys.argv[1], watch=None, save_every=1, model=model, events=Told()) as run:
    for step in run.range(3):
        run.wait()
        if step == 2:
            print("hanging", flush=True)
            while True:
                time.sleep(0.01)
"""


@pytest.mark.slow
def test_the_third_sigterm_ends_a_run_that_hangs(tmp_path: Path) -> None:
    """Exit code 143 without an end in the ledger, as for a lost machine; the next start goes on from step 2."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "hanging\n"
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "noticed\n"
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == spotsafe.errors.EXIT_RECLAIMED
    assert "SIGTERM for the third time: leaving at once" in said
    assert read_end(open_store(str(tmp_path)), 1) is None
    model = torch.nn.Linear(1, 1)
    with spotsafe.session(str(tmp_path), watch=None, resume="must", model=model) as run:
        assert run.step == 2
