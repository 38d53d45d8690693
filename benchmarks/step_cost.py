"""What a step costs that saves nothing, and what a save costs the training thread, beside torch.save.

    python benchmarks/step_cost.py

The first table is the time that `run.range` adds to an empty body: commit, marks of the safe point, the policy, the
look for a notice. The second is one state of linear layers with AdamW: how long the training thread is blocked, and
how long until the bytes are durable. `torch.save` ends in an fsync, so that both promise the same.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

import spotsafe
from spotsafe import events

REPEATS = 7


class Times:
    """Keeps what the events say about saves."""

    def __init__(self) -> None:
        self.blocked: list[float] = []
        self.written: list[float] = []

    def emit(self, event: events.Event) -> None:
        if isinstance(event, events.SaveStaged):
            self.blocked.append(event.blocked_s)
        elif isinstance(event, events.CheckpointPublished):
            self.written.append(event.write_s)


def layers(tensors: int, width: int) -> torch.nn.Module:
    return torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(tensors // 2)])


def step_cost_us(folder: str, tensors: int) -> float:
    """Microseconds that one empty step takes; the median of several stretches."""
    model = layers(tensors, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with spotsafe.session(
        f"{folder}/steps{tensors}", model=model, optimizer=optimizer, save_every=None
    ) as run:
        times = [time.perf_counter() for step in run.range(1 + REPEATS * 200) if step % 200 == 0]
    return statistics.median(b - a for a, b in itertools.pairwise(times)) / 200 * 1e6


def save_cost(folder: str, tensors: int, width: int) -> dict[str, float]:
    """Medians in seconds, ours and torch's turn by turn."""
    model = layers(tensors, width)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    ours, theirs = Times(), []
    with spotsafe.session(
        f"{folder}/saves{width}", model=model, optimizer=optimizer, save_every=1, keep=2, events=ours
    ) as run:
        for _ in run.range(REPEATS + 1):
            run.wait()
            theirs.append(torch_save_s(f"{folder}/peer.pt", state))
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return {
        "size": buffer.tell(),
        "blocked": statistics.median(ours.blocked),
        "durable": statistics.median(ours.written),
        "torch.save": statistics.median(theirs),
    }


def torch_save_s(path: str, state: dict[str, object]) -> float:
    began = time.perf_counter()
    with Path(path).open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


def main() -> None:
    with tempfile.TemporaryDirectory(dir=".") as folder, contextlib.redirect_stderr(io.StringIO()):
        print("tensors   empty step")
        for tensors in (20, 300, 1500):
            print(f"{tensors:7d}   {step_cost_us(folder, tensors):7.0f} us")
        print()
        print("tensors      size    blocked    durable   torch.save + fsync   blocked / torch.save")
        for tensors, width in ((64, 64), (64, 512), (64, 1024)):
            cost = save_cost(folder, tensors, width)
            print(
                f"{tensors * 3:7d}  {cost['size'] / 1e6:5.0f} MB  {cost['blocked'] * 1e3:6.1f} ms  "
                f"{cost['durable'] * 1e3:6.1f} ms  {cost['torch.save'] * 1e3:16.1f} ms  "
                f"{cost['blocked'] / cost['torch.save']:20.2f}"
            )


if __name__ == "__main__":
    main()
