"""Trains until it is reclaimed, and writes down who it is and what happens. For `tests/e2e/test_leaving.py`."""

from __future__ import annotations

import atexit
import os
from pathlib import Path

import torch

import spotsafe
from spotsafe.events import CallableSink, Event
from spotsafe.reclaim.leaving import leave

LOG = Path(os.environ["LOG"])


def tell(line: str) -> None:
    with LOG.open("a") as log:
        log.write(line + "\n")


def on_event(event: Event) -> None:
    detail = "" if not hasattr(event, "reason") else f" {event.reason}"
    tell(type(event).__name__ + detail)


tell(f"started {os.getpid()}")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    with spotsafe.session(
        os.environ["RUN"], model=model, optimizer=optimizer, save_every=None, events=CallableSink(on_event)
    ) as run:
        for _ in run.range(100_000_000):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
finally:
    if os.environ.get("AT_ONCE"):  # what would come of it without our way out
        atexit.unregister(leave)
