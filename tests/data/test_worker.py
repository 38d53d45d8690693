"""Worker processes: their group, their end, and how they are started. Each test runs a program of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spotsafe.data import worker

PROGRAM = """
import json, os, random, signal, sys, time
import numpy as np
import torch
from spotsafe.data.loader import ResumableDataLoader

FOLDER, OPTIONS = sys.argv[1], json.loads(sys.argv[2])

class Data:
    def __init__(self, payload):
        self.payload = payload
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if self.payload:
            return b"x" * self.payload
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))

def init(worker):
    with open(f"{FOLDER}/worker{worker}.part", "w") as file:
        held = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        file.write(f"{os.getpid()} {os.getpgid(0)} {default and not held}")
    os.rename(f"{FOLDER}/worker{worker}.part", f"{FOLDER}/worker{worker}")

def report(value):
    with open(f"{FOLDER}/report.part", "w") as file:
        json.dump(value, file)
    os.rename(f"{FOLDER}/report.part", f"{FOLDER}/report")

def main():
    payload = OPTIONS.pop("payload", 0)
    wait = OPTIONS.pop("wait", False)
    if OPTIONS.pop("signalled", False):
        os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
    collate = {"collate_fn": list} if payload else {}
    loader = ResumableDataLoader(Data(payload), 4, True, worker_init_fn=init, **collate, **OPTIONS)
    batches = iter(loader)
    first = next(batches)
    if wait:
        report({"group": os.getpgid(0)})
        time.sleep(600)
    both = [[first, *batches], list(ResumableDataLoader(Data(payload), 4, True))]
    report([[[column.tolist() for column in batch] for batch in batches] for batches in both])

if __name__ == "__main__":
    main()
"""


def until(condition: Callable[[], bool], *, seconds: float = 60) -> None:
    """Wait for what another process does; a failure, not a hang, if it never comes."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs: neither gone nor waiting to be reaped by the first process of the machine."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@contextmanager
def program(folder: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The program above, in a session of its own; nothing of it survives the block."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    process = subprocess.Popen([sys.executable, script, folder, json.dumps(options)], start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pid in [int(path.read_text().split()[0]) for path in folder.glob("worker?")]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def report_of(folder: Path) -> Any:
    until((folder / "report").exists)
    return json.loads((folder / "report").read_text())


def workers_of(folder: Path) -> list[list[str]]:
    until(lambda: len(list(folder.glob("worker?"))) == 2)
    return [path.read_text().split() for path in sorted(folder.glob("worker?"))]


@pytest.mark.slow
def test_workers_survive_a_signal_to_the_trainers_group_and_end_with_the_trainer(tmp_path: Path) -> None:
    """Each is in a group of its own and handles SIGTERM as any process does.

    After a SIGKILL of the trainer nothing is left, although the workers' queue to it is full of large samples.
    """
    with program(tmp_path, num_workers=2, wait=True, payload=1_000_000) as process:
        group = report_of(tmp_path)["group"]
        workers = workers_of(tmp_path)
        assert group == process.pid
        for pid, own_group, default_sigterm in workers:
            assert pid == own_group != str(group)
            assert default_sigterm == "True"
        os.killpg(group, signal.SIGKILL)
        process.wait()
        until(lambda: not any(alive(int(pid)) for pid, *_ in workers), seconds=20)


@pytest.mark.slow
def test_workers_survive_a_signal_to_the_group_that_they_have_not_left_yet(tmp_path: Path) -> None:
    """One that comes right after the fork is dropped, later ones are not; the trainer's own mask is as before."""
    with program(tmp_path, num_workers=2, signalled=True) as process:
        delivered, alone = report_of(tmp_path)
        assert process.wait(60) == 0
    assert delivered == alone
    assert [default_sigterm for *_, default_sigterm in workers_of(tmp_path)] == ["True", "True"]


def test_the_trainer_hears_what_came_while_workers_were_started() -> None:
    """The signal waits, is handled at the end of the block, and finds the mask as it was."""
    heard: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        with worker.starting_workers():
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            assert heard == []
        assert heard == [signal.SIGTERM]
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_workers_end_with_the_trainer_without_pidfd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel refuses to watch a process, the end is seen by polling."""

    def refuse(pid: int) -> int:
        raise PermissionError(pid)

    monkeypatch.setattr(worker.os, "pidfd_open", refuse, raising=False)
    monkeypatch.setattr(worker, "_POLL_S", 0.01)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child.communicate(b"\n")
    worker._wait_for_end(child.pid)  # returns: it has gone
    assert worker._exists(os.getpid())


@pytest.mark.slow
def test_spawned_workers_deliver_the_same(tmp_path: Path) -> None:
    """Everything that travels to a worker can be pickled; order and augmentation are those of no worker at all."""
    with program(tmp_path, num_workers=1, multiprocessing_context="spawn") as process:
        spawned, alone = report_of(tmp_path)
        assert process.wait(60) == 0
    assert spawned == alone
    assert len(spawned) == 10
