"""A training program whose every element of every tensor is the step, and somebody is killed on the way.

The environment: `RUN`, the folder; `PLAN`, JSON with ``until`` (steps), ``at`` (an event, or ``copy``: half of a copy),
``count`` (which of them) and ``who`` (``trainer``, ``writer``, ``both``, ``pause`` to wait for the test). ``stops`` is
a step in which the writer is made to stand still, and from which on nothing waits for a save. A line is written for
each event, with one system call. ``goes_on`` is the number of staged saves at which the writer moves again, and the
trainer then waits for what the plan does. ``keep`` is how many checkpoints stay.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import torch

import spotsafe
from spotsafe import copying
from spotsafe.events import Event
from tests.writer.processes import writers

plan: dict[str, Any] = json.loads(os.environ["PLAN"])
left, staged = [plan.get("count", 1)], [0]
lock, struck = threading.Lock(), threading.Event()


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def strike() -> None:
    """Kill whom the plan says, after the test has been told who the writer is."""
    found = writers()
    say("striking", *found)
    for pid in found if plan["who"] in {"writer", "both"} else ():
        os.kill(pid, signal.SIGKILL)
    if plan["who"] in {"trainer", "both"}:
        os.kill(os.getpid(), signal.SIGKILL)
    while plan["who"] == "pause":
        time.sleep(0.01)
    struck.set()


class Striking:
    """Counts the events of the plan."""

    def emit(self, event: Event) -> None:
        name = type(event).__name__
        say(name, getattr(event, "step", ""), getattr(event, "checkpoint", getattr(event, "message", "")))
        if name == "SaveStaged":
            staged[0] += 1
            if staged[0] == plan.get("goes_on"):
                os.kill(writers()[0], signal.SIGCONT)
        with lock:
            if name != plan.get("at") or left[0] == 0:
                return
            left[0] -= 1
            if left[0]:
                return
        strike()


def copy_half(real: Any, *arguments: Any, **options: Any) -> None:
    """The trainer goes in the middle of a copy: one file is there, and half of the next."""
    left[0] -= 1
    if left[0]:
        real(*arguments, **options)
        return
    arena = arguments[2]
    kept = bytes(arena)
    reached = options.pop("reached", lambda _: None)
    real(*arguments, **options)
    arena[len(arena) // 2 :] = kept[len(arena) // 2 :]
    reached(len(arena) // 2)
    time.sleep(0.05)  # so that the writer may begin with what is there
    strike()


def main() -> None:
    if plan.get("at") == "copy":
        real = copying.stage
        copying.stage = lambda *a, **o: copy_half(real, *a, **o)
    weights = {f"w{n}": torch.zeros(plan.get("size", 1000)) for n in range(4)}
    with spotsafe.session(
        os.environ["RUN"],
        state=weights,
        save_every=1,
        keep=plan.get("keep", 3),
        watch=None,
        writer=plan.get("writer", "process"),
        events=Striking(),
        drain_timeout=timedelta(seconds=60),
        restart_limits=spotsafe.Limits(starts_per_hour=1000, fruitless=1000),
    ) as run:
        say("resumed", run.step, writers())
        for step in run.range(plan.get("until", 4)):
            if step <= plan.get("stops", step):
                run.wait()
            if step == plan.get("stops"):
                os.kill(writers()[0], signal.SIGSTOP)
            if staged[0] == plan.get("goes_on"):
                struck.wait()
            for one in weights.values():
                one.fill_(step + 1)
    say("ended")


main()
