"""Saves over and over, as fast as the slots let it, every tenth one to no avail; and tells what that holds.

The environment: `RUN`, the folder; `WRITER`; `SAVES`. A line of JSON is written after the first saves, and at the end:
bytes of memory of all processes, shared pages counted once, and of shared memory that a descriptor still holds;
descriptors; saves that began while another was in flight; how saves ended so far.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import spotsafe
from spotsafe import events
from spotsafe.checkpoint.layout import CHECKPOINTS
from tests.writer.processes import writers

RUN = Path(os.environ["RUN"])
SAVES = int(os.environ["SAVES"])
SIZE = 64 << 20
WARM_SAVES = 40
FAILS_EVERY = 10


class Sabotage:
    """Puts a file in the place of the folder of every tenth save, and takes it away when the save has failed."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        return self.count["SaveStarted"] - self.count["CheckpointPublished"] - self.count["SaveFailed"]

    def emit(self, event: events.Event) -> None:
        if isinstance(event, events.SaveStarted):
            self.count["beside another"] += self.in_flight > 0
            if self.count["SaveStarted"] % FAILS_EVERY == FAILS_EVERY // 2:
                (RUN / CHECKPOINTS / event.checkpoint).touch()
        elif isinstance(event, events.SaveFailed):
            (RUN / CHECKPOINTS / event.checkpoint).unlink()
        self.count[type(event).__name__] += 1


def proportional_bytes(pid: int) -> int:
    """Without the code of libraries, whose share is less while other processes of the machine have them too."""
    lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line[1]) * 1024 for line in lines if line[0] in {"Pss_Anon:", "Pss_Shmem:"})


def shared_bytes(pids: list[int]) -> int:
    """Of files in memory that any of them holds open, whether it is mapped or not."""
    found = {}
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # by which this very folder was listed
                if os.readlink(link).startswith("/memfd:spotsafe"):
                    status = link.stat()
                    found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def held(pid: int) -> int:
    """Descriptors that stay: the heartbeat, and what is deleted behind a publish, open some for a moment."""
    found = []
    for _ in range(50):
        found.append(len(os.listdir(f"/proc/{pid}/fd")))
        time.sleep(0.005)
    return min(found)


def say(count: Counter[str]) -> None:
    gc.collect()
    pids = [os.getpid(), *writers()]
    numbers: dict[str, Any] = {
        "memory": sum(map(proportional_bytes, pids)),
        "shared": shared_bytes(pids),
        "descriptors": [held(pid) for pid in pids],
        "count": count,
    }
    print(json.dumps(numbers), flush=True)


def main() -> None:
    sink, weight = Sabotage(), torch.zeros(SIZE // 4)
    with spotsafe.session(
        str(RUN),
        state={"weight": weight},
        save_every=1,
        keep=2,
        watch=None,
        writer=os.environ["WRITER"],  # type: ignore[arg-type] # one of its values
        staging_memory=3 * SIZE,
        events=sink,
    ) as run:
        for saves in (WARM_SAVES, SAVES):
            for _ in run.range(1 << 30, name=str(saves)):
                weight += 1
                if sink.count["SaveStarted"] >= saves:
                    break
            while sink.in_flight:
                time.sleep(0.001)
            say(sink.count)


main()
