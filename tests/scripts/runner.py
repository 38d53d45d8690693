"""Runs one of the scripts in `programs` as a process of its own, and watches: what it traced, told and ended with.

A script is what a user would write: a function ``main(url, trace)`` that returns everything it trained. How a start
is told what to do, and where it writes, is that of `tests/e2e/scripts/train.py`. Beside the options ``url``, ``out``
and ``script`` there are

- ``kill_at_line``, ``terminate_at_line``: SIGKILL or SIGTERM right behind so many lines of the trace;
- ``kill_at``: ``EVENT:COUNT``, SIGKILL exactly there, so a thread writes: a process of its own would go on.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from spotsafe import events
from spotsafe.options import WRITER
from tests.e2e.scripts.train import EventLog, Lines, digest, kill_at


class Trace:
    """What a script calls for each thing it did, under a name that comes once in an uninterrupted run."""

    def __init__(self, path: str, *, signals: Mapping[int, int]) -> None:
        self._lines = Lines(path)
        self._signals = signals
        self._count = 0

    def __call__(self, kind: str, number: object, value: Any, ids: Iterable[int] = ()) -> None:
        value = value.item() if isinstance(value, torch.Tensor) else value
        self._lines.write([f"{kind} {number}", value.hex(), [int(one) for one in ids]])
        self._count += 1
        if self._count in self._signals:
            os.kill(os.getpid(), self._signals[self._count])


def state_of(value: Any) -> Any:
    """Everything of a tracked object that another one could differ in."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, Mapping):
        return {key: state_of(one) for key, one in value.items()}
    return value.state_dict() if hasattr(value, "state_dict") else value


def main() -> None:
    options = json.loads(os.environ["TRAIN_OPTIONS"])
    out = options["out"]
    signals = {"kill_at_line": signal.SIGKILL, "terminate_at_line": signal.SIGTERM}
    trace = Trace(
        f"{out}.trace", signals={options[name]: one for name, one in signals.items() if name in options}
    )
    events.install(EventLog(f"{out}.events"))
    if "kill_at" in options:
        events.install(kill_at(options["kill_at"], signal.SIGKILL))
        os.environ[WRITER] = "thread"
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    trained = runpy.run_path(options["script"])["main"](options["url"], trace)
    trained["generators"] = [torch.get_rng_state(), list(random.getstate()), list(np.random.get_state())]
    Lines(f"{out}.result").write({name: digest(state_of(value)) for name, value in trained.items()})


if __name__ == "__main__":
    main()
