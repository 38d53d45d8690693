"""What a checkpoint costs training on a GPU: the time that it blocks, and how much slower steps are beside it.

    python benchmarks/gpu_save_cost.py [--gb 12] [--step 0.5] [--saves 10] [--steps-between 40] [--only NAME,...]

A loop of real training, each method in a process of its own; before the clock starts it has saved a few times. Every
step ends when the device has done it, so that a save is charged with nothing of the step before. *Blocked* is all time
that the training thread spends in the saver, waits before an optimizer's step included. A step that touches the time
between the call and the end of the copy is one *during the copy*, one that touches the time from there to the end of
the save is one *during the write*; their medians are compared with that of all others in the same process. A dash means
that there were none; a larger `--steps-between` leaves more that are beside no save. *Durable* counts from the call
until the saver says that it is done. `torch.save` does everything while training waits. Without a CUDA device there is
nothing to be measured, and that is said; `--device cpu` runs it all the same, to see that it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from save_cost import (
    GIB,
    LAYERS,
    METHODS,
    WARM_SAVES,
    DcpAsync,
    DcpProcess,
    Method,
    Ours,
    Pending,
    TorchSave,
    Training,
    calibrated,
    measure,
)

STATES = 3
"""Tensors of a parameter's size in the state: itself, and two moments."""


# -- what is watched -----------------------------------------------------------------------------------------------


@dataclass
class Saving:
    """When one save was where, in seconds; infinite where it never came."""

    called: float
    copied: float = math.inf
    durable: float = math.inf


@dataclass
class Watch:
    """When steps and saves were."""

    steps: list[tuple[float, float]] = field(default_factory=list)
    saves: list[Saving] = field(default_factory=list)

    def call(self) -> Saving:
        """A save begins."""
        self.saves.append(Saving(time.perf_counter()))
        return self.saves[-1]

    def clear(self) -> None:
        """What was so far was to warm up."""
        self.steps.clear()
        self.saves.clear()

    def quiet(self) -> list[float]:
        """The seconds of steps beside no save."""
        spans = [(one.called, one.durable) for one in self.saves]
        return [end - begin for begin, end in self.steps if not touched(begin, end, spans)]

    def during_copy(self) -> list[float]:
        """Those of steps beside a copy."""
        spans = [(one.called, one.copied) for one in self.saves]
        return [end - begin for begin, end in self.steps if touched(begin, end, spans)]

    def during_write(self) -> list[float]:
        """Those of steps beside a write, and no copy."""
        copies = [(one.called, one.copied) for one in self.saves]
        writes = [(one.copied, one.durable) for one in self.saves]
        return [
            end - begin
            for begin, end in self.steps
            if touched(begin, end, writes) and not touched(begin, end, copies)
        ]


def touched(begin: float, end: float, spans: list[tuple[float, float]]) -> bool:
    """Whether any span has a part of this one."""
    return any(begin < until and since < end for since, until in spans)


class WatchedTraining(Training):
    """Training on a device, whose steps end when the device has done them."""

    def __init__(self, width: int, batch: int, device: str) -> None:
        super().__init__(width, batch, device)
        self.device, self.watch, self.began = device, Watch(), 0.0
        self.optimizer.register_step_post_hook(lambda *_: self.done())

    def forward_backward(self) -> None:
        """Begin a step."""
        self.began = time.perf_counter()
        super().forward_backward()

    def done(self) -> None:
        """The step is over."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        self.watch.steps.append((self.began, time.perf_counter()))


# -- the methods, watched ------------------------------------------------------------------------------------------


class WatchedMethod(Method):
    """What all have: the save that is under way."""

    training: WatchedTraining
    saving: Saving

    def close(self) -> None:
        """Leave nothing behind in this process."""

    def save(self) -> None:
        """Note when it is called; what returns has copied, unless a subclass knows better."""
        self.saving = self.training.watch.call()
        super().save()
        self.returned(self.saving)

    def returned(self, saving: Saving) -> None:
        """All is done that the call does."""
        saving.copied = time.perf_counter()


class WatchedTorchSave(WatchedMethod, TorchSave):
    """Everything is done when it returns."""

    def returned(self, saving: Saving) -> None:
        """Nothing is left to do."""
        saving.copied = saving.durable = time.perf_counter()


class WatchedPending(WatchedMethod, Pending):
    """Somebody writes when the call has returned."""

    def wait_for(self, future: Any) -> None:
        """Until this is done."""
        saving = self.saving
        future.add_done_callback(lambda _: setattr(saving, "durable", time.perf_counter()))
        super().wait_for(future)


class WatchedDcpAsync(WatchedPending, DcpAsync):
    """Copies before it returns."""


class WatchedDcpProcess(WatchedPending, DcpProcess):
    """Copies beside training, to pinned memory if it has to come from a device."""

    def __init__(self, training: WatchedTraining, folder: str) -> None:
        self.pinned = training.device == "cuda"
        super().__init__(training, folder)

    def returned(self, saving: Saving) -> None:
        """It is being copied."""
        self.staging.add_done_callback(lambda _: setattr(saving, "copied", time.perf_counter()))


class WatchedOurs(Ours):
    """The session tells."""

    training: WatchedTraining

    def close(self) -> None:
        """Leave the session."""
        with contextlib.redirect_stderr(io.StringIO()):
            self.session.close()

    def emit(self, event: Any) -> None:
        """Take note of it."""
        from spotsafe import events

        super().emit(event)
        saves = self.training.watch.saves
        if isinstance(event, events.SaveStarted):
            self.training.watch.call()
        elif isinstance(event, events.SaveStaged):
            saves[-1].copied = time.perf_counter()
        elif isinstance(event, events.CheckpointPublished):
            saves[-1].durable = time.perf_counter()


WATCHED: dict[str, type[WatchedMethod | WatchedOurs]] = {
    "spotsafe": WatchedOurs,
    "torch": WatchedTorchSave,
    "async": WatchedDcpAsync,
    "process": WatchedDcpProcess,
}


# -- one process ---------------------------------------------------------------------------------------------------


def measured(method: WatchedMethod | WatchedOurs, *, saves: int, steps_between: int) -> dict[str, Any]:
    """Train and save in this process.

    Returns:
        the row of the table.
    """
    training = method.training
    Path(method.folder).mkdir(exist_ok=True)
    method.run(WARM_SAVES * steps_between, steps_between)
    method.drain()
    training.watch.clear()
    method.blocked.clear()
    method.durable.clear()
    method.run(saves * steps_between, steps_between)
    method.drain()
    watch = training.watch
    return {
        "blocked": list(method.blocked),
        "durable": list(method.durable),
        "quiet": watch.quiet(),
        "copy": watch.during_copy(),
        "write": watch.during_write(),
        "nbytes": training.nbytes,
    }


def child(name: str, folder: str, device: str, numbers: list[int]) -> None:
    """Measure one method, and print the row."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    width, batch, saves, steps_between = numbers
    if name in {"async", "process"}:
        dist.init_process_group("gloo", init_method=f"file://{folder}.group", rank=0, world_size=1)
    training = WatchedTraining(width, batch, device)
    row = measured(WATCHED[name](training, folder), saves=saves, steps_between=steps_between)
    print(json.dumps(row), flush=True)
    os._exit(0)  # the savers' own ends are not measured


# -- all of them ---------------------------------------------------------------------------------------------------


def width_of(gigabytes: float) -> int:
    """The width of layers whose state is so large."""
    return max(8, round(math.sqrt(gigabytes * 1e9 / (LAYERS * STATES * 4))))


def slower(steps: list[float], quiet: list[float]) -> str:
    """How much slower steps are, in percent; a dash if there are none, or none to compare with."""
    if not steps or not quiet:
        return "-"
    return f"{100 * (statistics.median(steps) / statistics.median(quiet) - 1):+.1f} %"


def line(name: str, row: dict[str, Any]) -> str:
    """The row, for people."""
    blocked, quiet = row["blocked"], row["quiet"]
    durable = f"{statistics.median(row['durable']):.2f}" if row["durable"] else "-"
    step = f"{statistics.median(quiet):.3f}" if quiet else "-"
    return (
        f"{METHODS[name][0]:44s}{statistics.median(blocked) * 1e3:12.1f}{max(blocked) * 1e3:8.0f}"
        f"{slower(row['copy'], quiet):>13s}{slower(row['write'], quiet):>14s}"
        f"{durable:>11s}{step:>9s}"
    )


def head(nbytes: int, device: str) -> str:
    """The lines above the table."""
    import torch

    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    title = f"{nbytes / 1e9:.2f} GB ({nbytes / GIB:.2f} GiB) of state on {where}, torch {torch.__version__}"
    heads = f"{'blocked ms':>12s}{'most':>8s}{'during copy':>13s}{'during write':>14s}{'durable s':>11s}{'step s':>9s}"
    return f"{title}\n{'':44s}{heads}"


def table(options: argparse.Namespace, folder: Path) -> None:
    """Measure one after another, and print."""

    import torch

    def make(width: int, batch: int) -> Training:
        return WatchedTraining(width, batch, options.device)

    width = width_of(options.gb)
    batch = calibrated(width, options.step, make)
    if options.device == "cuda":
        torch.cuda.empty_cache()  # the others need the room
    arguments = [options.device, *map(str, (width, batch, options.saves, options.steps_between))]
    titled = False
    for name in options.only.split(","):
        row = measure(name, folder, arguments, script=__file__)
        if row is not None and not titled:
            print(head(row["nbytes"], options.device))
            titled = True
        if row is not None:
            print(line(name, row), flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=12.0)
    parser.add_argument("--step", type=float, default=0.5)
    parser.add_argument("--saves", type=int, default=10)
    parser.add_argument("--steps-between", type=int, default=40)
    parser.add_argument("--only", default=",".join(WATCHED))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--folder", default=".", help="where the checkpoints go")
    parser.add_argument("--case", nargs="+")
    options = parser.parse_args(arguments)
    if options.case:
        name, folder, device, *numbers = options.case
        child(name, folder, device, [int(one) for one in numbers])
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("nothing is measured: torch finds no CUDA device on this machine")
        return
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-"))
        table(options, Path(folder).resolve())


if __name__ == "__main__":
    main()
