"""What a step costs that saves nothing, and what a save costs the training thread, beside torch.save.

    python benchmarks/step_cost.py

The first table is the time that `run.range` adds to an empty body: commit, marks of the safe point, the policy, the
look for a notice. The second is one state of linear layers with AdamW, each in a process of its own: how long the
training thread is blocked from the end of one body to the beginning of the next, at the first save and later, and how
long until the bytes are durable. No optimizer steps, so nothing is copied beside training. `torch.save` ends in an
fsync, so that both promise the same.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

import spotsafe
from spotsafe import events

REPEATS = 7


class Durable:
    """Keeps how long saves took to be written."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def emit(self, event: events.Event) -> None:
        if isinstance(event, events.CheckpointPublished):
            self.times.append(event.write_s)


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
    durable, blocked, theirs = Durable(), list[float](), list[float]()
    with (
        contextlib.redirect_stderr(io.StringIO()),
        spotsafe.session(
            f"{folder}/saves", model=model, optimizer=optimizer, save_every=1, keep=2, events=durable
        ) as run,
    ):
        ended = 0.0
        for step in run.range(REPEATS + 1):
            blocked += [time.perf_counter() - ended] if step else []
            run.wait()
            theirs.append(torch_save_s(f"{folder}/peer.pt", state))
            ended = time.perf_counter()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return {
        "size": buffer.tell(),
        "first": blocked[0],
        "blocked": statistics.median(blocked[1:]),
        "durable": statistics.median(durable.times),
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
    with tempfile.TemporaryDirectory(dir=".") as folder:
        print("tensors   empty step")
        with contextlib.redirect_stderr(io.StringIO()):
            for tensors in (20, 300, 1500):
                print(f"{tensors:7d}   {step_cost_us(folder, tensors):7.0f} us")
    print()
    print("tensors      size   1st save   blocked    durable   torch.save + fsync   blocked / torch.save")
    for tensors, width in ((64, 64), (500, 64), (500, 120), (64, 512), (64, 1024)):
        alone = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        with tempfile.TemporaryDirectory(dir=".") as folder, alone as process:
            cost = process.submit(save_cost, folder, tensors, width).result()
        print(
            f"{tensors * 3:7d}  {cost['size'] / 1e6:5.0f} MB  {cost['first'] * 1e3:6.1f} ms  "
            f"{cost['blocked'] * 1e3:5.1f} ms  {cost['durable'] * 1e3:6.1f} ms  {cost['torch.save'] * 1e3:16.1f} ms  "
            f"{cost['blocked'] / cost['torch.save']:20.2f}"
        )


if __name__ == "__main__":
    main()
