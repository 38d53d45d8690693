"""What a real process does that ends at a step, or is killed in the middle of saving; run by the fork server.

It writes a line for everything that happens, with one system call, so that all of them are there when it is gone.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from spotsafe.checkpoint.verify import verify
from spotsafe.events import CheckpointPublished, Event, IndexWritten
from spotsafe.storage.local import LocalStore
from spotsafe.storage.retrying import RetryingStore
from spotsafe.storage.store import Store
from spotsafe.testing.faults import kill_process
from tests.crashes.lives import CLEANING, LARGE, SAVING, Tell, TwoRanks, published, resume
from tests.crashes.places import Disk, Place, Seaweed
from tests.crashes.steps import Steps
from tests.e2e.processes import Launcher, Process

SCRIPT = Path(__file__).with_name("scripts") / "live.py"
OPTIONS = "CRASH_OPTIONS"
"""Environment variable: what to do, as JSON."""
AGED_S = 30_000.0
"""Seconds of run time from one save to the next: every third save writes the frozen file anew."""
TRAINING_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Event):
    """The process has come so far."""

    word: str
    detail: str = ""


def start(launcher: Launcher, log: Path, options: Mapping[str, object]) -> Process:
    """A process that does this; what it says is in a file."""
    log.touch()  # it may be gone before it can
    return launcher.fork(SCRIPT, log=log, environment={OPTIONS: json.dumps(options)})


def kill_myself() -> None:
    """SIGKILL, at this very instruction."""
    os.kill(os.getpid(), signal.SIGKILL)


def say(*words: str) -> None:
    """A line on standard output, whatever happens next."""
    os.write(1, (" ".join(words) + "\n").encode())


def train(store: Store, tell: Tell, *, saves: int | None = None, stride: int = 1) -> None:
    """Look, verify, resume, claim, and save again and again.

    Args:
        store: the run.
        tell: receives a `Step` for each phase, and the events of the saves.
        saves: how many; by default until somebody ends the process.
        stride: steps from one save to the next.
    """
    names = published(store)
    for name in names:
        assert verify(store, name) == [], f"{name} is whole"
    tell(Step(word="found", detail=" ".join(map(str, names))))
    newest = resume(store)
    assert (newest is None) if not names else (newest is not None and newest >= names[0])
    attempt = TwoRanks(store, tell=tell)
    step = LARGE if newest is None else newest.step
    while saves is None or len(attempt.results) < saves:
        tell(Step(word="training"))
        time.sleep(TRAINING_S)
        step += stride
        attempt.now += AGED_S
        tell(Step(word="saving", detail=str(attempt.name_of(step))))
        result = attempt.save(step)
        assert result.published, result
        assert result.error is None, result


def told(event: Event) -> None:
    """Say an event."""
    detail = event.checkpoint if isinstance(event, CheckpointPublished) else getattr(event, "detail", "")
    say(said(event), detail)


def said(event: Event) -> str:
    """The first word of the line for an event."""
    return event.word if isinstance(event, Step) else type(event).__name__


def phase_after(word: str, before: str) -> str:
    """Where a process is once it has said a line that begins with this word."""
    words = {"training": "between", "saving": "writing"}
    words |= {IndexWritten.__name__: "publish", CheckpointPublished.__name__: "retention"}
    return words.get(word, before)


class Aim:
    """Lets a step of a phase go wrong, after everything was told; in the phase between two saves there are none.

    Args:
        steps: where they are made.
        phase: which one.
        count: which time that it begins, from 1.
        at: which of its steps, from 1.
    """

    def __init__(self, steps: Steps, *, phase: str, count: int, at: int) -> None:
        self._steps, self._wanted, self._left, self._at = steps, phase, count, at
        self._phase = "start"

    def __call__(self, event: Event) -> None:
        told(event)
        before, self._phase = self._phase, phase_after(said(event), self._phase)
        if self._phase == self._wanted != before:
            self._left -= 1
            if self._left == 0 and self._phase == "between":
                kill_myself()
            elif self._left == 0:
                self._steps.aim(self._at)


def main() -> None:
    """Do what the environment says."""
    options: dict[str, Any] = json.loads(os.environ[OPTIONS])
    dies: dict[str, Callable[[], None]] = {"exit": kill_process, "kill": kill_myself}
    aim = options.get("aim")
    steps = Steps(options.get("at", 0), options.get("kind", "before"), die=dies[options.get("die", "exit")])
    tell = told if aim is None else Aim(steps, **aim)
    lives: dict[str, Callable[[Store, Tell], object]] = {life.name: life.live for life in (SAVING, CLEANING)}
    lives["train"] = partial(train, stride=options.get("stride", 1))
    place, store = opened(options["run"], options.get("endpoint"))
    with place.faulty(store, options["level"], steps) as faulty:
        lives[options["life"]](RetryingStore(faulty), tell)
    say("ended")


def opened(run: str, endpoint: str | None) -> tuple[Place, Store]:
    """Where the run lies, a folder or a prefix in the bucket of a server, and the run."""
    if endpoint is None:
        return Disk(Path()), LocalStore(run)
    seaweed = Seaweed(endpoint)
    return seaweed, seaweed.store(run)
