"""A training program as a user writes one, with ways to look at it and to hurt it.

It is run as a process of its own and is the same command each time; what differs between two starts (where to
write its traces, when to die) comes by the environment variable `TRAIN_OPTIONS`. Beside the option ``out`` it writes

- ``<out>.trace``: a line for each step that was made: number, loss (exact), sample ids;
- ``<out>.events``: a line for each event of the session;
- ``<out>.result``: when the loop has come to its end, digests of everything that was trained.

All are files, appended to by single writes: what was written before a SIGKILL is there after it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import numpy as np
import torch

import spotsafe
from spotsafe.errors import StorageUnavailable
from spotsafe.events import Event
from spotsafe.policy.restarts import Limits
from spotsafe.storage.local import LocalStore
from spotsafe.storage.store import Store
from spotsafe.storage.wrapping import Operation
from spotsafe.testing.faults import CrashingStore, FailingStore
from spotsafe.testing.killing import KillAt

T = TypeVar("T")

LEDGER_THREAD = "spotsafe-ledger"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a start of the program is told."""

    url: str
    out: str
    until: int = 24
    save_every: int = 2
    workers: int = 0
    lockstep: bool = False
    """Wait for each save: then the order of the storage operations is the same in each process."""
    kill_at: str | None = None
    """``EVENT:COUNT``: SIGKILL exactly there, so a thread writes: a process of its own would go on."""
    terminate_at: str | None = None
    """``EVENT:COUNT``: SIGTERM there."""
    crash_at: int | None = None
    """Number of the storage operation at which the process is gone."""
    crash_when: Literal["before", "after"] = "before"
    crash_ledger: bool = False
    """Count the operations of the ledger's thread, not those of the others."""
    fail_data_of: list[int] = dataclasses.field(default_factory=list)
    """Numbers of the data files, from 1, whose writing fails."""
    hold_at: int | None = None
    """Wait in the body of this step until there is a file ``<out>.go``."""


class Net(torch.nn.Module):
    """Dropout draws random numbers; running statistics are buffers that the forward pass writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 48), torch.nn.BatchNorm1d(48), torch.nn.ReLU(), torch.nn.Dropout(0.3)
        )
        self.last = torch.nn.Linear(48, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(x))


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Augmented at random, so that a sample tells whether its generators were those of the reference."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.arange(16.0) * (index + 1) / 400 + torch.rand(16) + random.random() + np.random.rand()
        return {"id": torch.tensor(index), "x": x, "y": x.mean(dim=0, keepdim=True)}


class Lines:
    """A file of lines, each written by one call."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, line: object) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


class EventLog:
    """A sink that writes each event down at once."""

    def __init__(self, path: str) -> None:
        self._lines = Lines(path)

    def emit(self, event: Event) -> None:
        self._lines.write(
            {"event": type(event).__name__, "at": time.monotonic(), **dataclasses.asdict(event)}
        )


class CrashingByThread(CrashingStore):
    """Counts either the operations of the ledger's thread or all others, so that either order is always the same."""

    def __init__(self, inner: Store, *, at: int, when: Literal["before", "after"], ledger: bool) -> None:
        super().__init__(inner, at=at, when=when)
        self.ledger = ledger
        self.operations: list[str] = []

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        if (threading.current_thread().name == LEDGER_THREAD) != self.ledger:
            return call()
        self.operations.append(f"{operation.name} {operation.path}")
        return super().around(operation, call)


def make_store(options: Options) -> str | Store:
    """The run's folder, or a store that goes wrong around it."""
    if options.crash_at is not None:
        return CrashingByThread(
            LocalStore(options.url), at=options.crash_at, when=options.crash_when, ledger=options.crash_ledger
        )
    if options.fail_data_of:
        files = iter(range(1, 1_000_000))

        def fail(name: str, path: str, _number: int) -> Exception | None:
            if name == "put_large" and next(files) in options.fail_data_of:
                return StorageUnavailable(f"the disk of this test is gone: {path}", path=path)
            return None

        return FailingStore(LocalStore(options.url), fail=fail)
    return options.url


def kill_at(text: str, signum: int) -> KillAt:
    event, _, count = text.partition(":")
    return KillAt(event, count=int(count or 1), signum=signum)


def hold(path: str) -> None:
    """Wait until another process has made the file, a minute at most."""
    patience = time.monotonic() + 60
    while not os.path.exists(path):
        if time.monotonic() > patience:
            sys.exit(f"nobody made {path}")
        time.sleep(0.005)


def digest(value: Any) -> str:
    """Of every bit of nested state."""
    return hashlib.sha256(repr(plain(value)).encode()).hexdigest()


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), hashlib.sha256(data).hexdigest()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes().hex()
    if isinstance(value, dict):
        return sorted((str(key), plain(one)) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value.hex() if isinstance(value, float) else value


def main() -> None:
    options = Options(**json.loads(os.environ["TRAIN_OPTIONS"]))
    torch.set_num_threads(1)
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    loader = spotsafe.ResumableDataLoader(
        Samples(), batch_size=8, shuffle=True, seed=3, num_workers=options.workers
    )
    trace = Lines(f"{options.out}.trace")
    sinks: list[Any] = [EventLog(f"{options.out}.events")]
    if options.kill_at is not None:
        sinks.append(kill_at(options.kill_at, signal.SIGKILL))
    if options.terminate_at is not None:
        sinks.append(kill_at(options.terminate_at, signal.SIGTERM))
    store = make_store(options)
    with spotsafe.session(
        store,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        save_every=options.save_every,
        keep=2,
        watch=None,
        events=sinks,
        drain_timeout=timedelta(seconds=60),
        writer="auto" if options.kill_at is None else "thread",
        restart_limits=Limits(starts_per_hour=10_000),  # killed for a living
    ) as run:
        for step, batch in run.steps(loader, until=options.until):
            loss = (model(batch["x"]) - batch["y"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            trace.write([step, loss.item().hex(), batch["id"].tolist()])
            if step == options.hold_at:
                hold(f"{options.out}.go")
            if options.lockstep:
                run.wait()
    result = {
        "weights": digest(model.state_dict()),
        "optimizer": digest(optimizer.state_dict()),
        "scheduler": digest(scheduler.state_dict()),
        "rng": digest([torch.get_rng_state(), list(random.getstate()), list(np.random.get_state())]),
        "operations": getattr(store, "operations", []),
    }
    Lines(f"{options.out}.result").write(result)


if __name__ == "__main__":
    main()
