"""What a checkpoint costs training: the wall time that it adds, and what else it takes, beside other savers.

    python benchmarks/save_cost.py [--steps 0.2,1.0] [--saves 10] [--rounds 2] [--only NAME,...] [--width 1800]

A loop of real training on all cores is timed with no save and with each method, turn by turn, each time in a process of
its own; before the clock starts the method has saved a few times. *Added* is what a save adds to the wall time of the
loop, from the medians of the rounds; the spread of the loops without saves is printed with it. *Blocked* is all time
that the training thread spends in the saver, waits before an optimizer's step included. *Durable* counts from the call
until the saver says that it is done: of the others only `torch.save` and `dcp.save` have synced the disk by then.
Processor time and memory are those of all processes together, beyond those of the loop without saves.

`torch_checkpointing` (`pip install torch_checkpointing`) is measured without direct I/O, which fails with EINVAL for
tensors whose size is no multiple of 512.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from store import cpu_s, tree

ROOT = Path(__file__).resolve().parent.parent
WARM_SAVES = 4
LAYERS = 24
GIB = 1 << 30


# -- the training loop ---------------------------------------------------------------------------------------------


class Training:
    """Linear layers with AdamW; `batch` sets how long a step takes, and with `ema` an average follows the weights."""

    def __init__(self, width: int, batch: int, device: str = "cpu", *, ema: bool = False) -> None:
        import torch

        torch.manual_seed(0)
        layers = [torch.nn.Linear(width, width, device=device) for _ in range(LAYERS)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.inputs = torch.randn(batch, width, device=device)
        self.averaged = torch.optim.swa_utils.AveragedModel(self.model) if ema else None

    def update(self) -> None:
        self.optimizer.step()
        if self.averaged is not None:
            self.averaged.update_parameters(self.model)

    def forward_backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    @property
    def nbytes(self) -> int:
        copies = 3 if self.averaged is None else 4
        return copies * sum(one.numel() * one.element_size() for one in self.model.parameters())


class Method:
    """One way to save. A subclass says how; `blocked` and `durable` are its times, in seconds."""

    def __init__(self, training: Training, folder: str) -> None:
        self.training, self.folder, self.number = training, folder, 0
        self.blocked: list[float] = []
        self.durable: list[float] = []

    def save(self) -> None:
        """Begin a save; complete or not."""

    def before_step(self) -> None:
        """Wait until the optimizer may write."""

    def drain(self) -> None:
        """Wait until every save is complete."""

    def path(self) -> str:
        """Where the next save goes; two are kept."""
        self.number += 1
        shutil.rmtree(f"{self.folder}/{self.number - 2}", ignore_errors=True)
        return f"{self.folder}/{self.number}"

    def run(self, steps: int, save_every: int) -> float:
        """Train, and save every so many steps; the seconds of the loop."""
        began = time.perf_counter()
        for step in range(steps):
            self.training.forward_backward()
            start = time.perf_counter()
            self.before_step()
            waited = time.perf_counter() - start
            self.training.update()
            if self.blocked and waited > 1e-5:
                self.blocked[-1] += waited
            if save_every and step % save_every == 0:
                start = time.perf_counter()
                self.save()
                self.blocked.append(time.perf_counter() - start)
        return time.perf_counter() - began


class NoSave(Method):
    """The base line."""


class TorchSave(Method):
    """`torch.save` and an fsync."""

    def save(self) -> None:
        import torch

        start, path = time.perf_counter(), self.path()
        Path(path).mkdir()
        with Path(f"{path}/state.pt").open("wb") as file:
            torch.save(self.training.state(), file)
            file.flush()
            os.fsync(file.fileno())
        self.durable.append(time.perf_counter() - start)


class DcpSave(Method):
    """`dcp.save`."""

    def save(self) -> None:
        import torch.distributed.checkpoint as dcp

        start = time.perf_counter()
        dcp.save(self.training.state(), checkpoint_id=self.path())
        self.durable.append(time.perf_counter() - start)


class Pending(Method):
    """Saves that complete in the background, one at a time."""

    pending: Any = None

    def wait_for(self, future: Any) -> None:
        start = time.perf_counter()
        future.add_done_callback(lambda _: self.durable.append(time.perf_counter() - start))
        self.pending = future

    def drain(self) -> None:
        if self.pending is not None:
            self.pending.result()


class DcpAsync(Pending):
    """`dcp.async_save` as it comes: it copies before it returns."""

    def save(self) -> None:
        import torch.distributed.checkpoint as dcp

        self.drain()
        self.wait_for(dcp.async_save(self.training.state(), checkpoint_id=self.path()))


class DcpProcess(Pending):
    """`dcp.async_save` with a process, and a stager that copies to shared memory beside training."""

    staging: Any = None
    pinned = False

    def __init__(self, training: Training, folder: str) -> None:
        super().__init__(training, folder)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        options = StagingOptions(
            use_pinned_memory=self.pinned,
            use_shared_memory=True,
            use_async_staging=True,
            use_non_blocking_copy=self.pinned,
        )
        self.stager = DefaultStager(options)

    def save(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.drain()
        response = dcp.async_save(
            self.training.state(),
            checkpoint_id=self.path(),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self.stager,
        )
        self.staging = response.staging_completion
        self.wait_for(response.upload_completion)

    def before_step(self) -> None:
        if self.staging is not None:
            self.staging.result()
            self.staging = None


class TorchCheckpointing(Pending):
    """`torch_checkpointing`, whose lock holds the optimizer back while it copies."""

    def __init__(self, training: Training, folder: str) -> None:
        super().__init__(training, folder)
        from torch_checkpointing.checkpoint_manager import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        config = CheckpointManager.Config.with_async_save()
        config.save.staging_config.use_pinned_memory = False
        config.save.staging_config.use_non_blocking_copy = False
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = config.build()

    def save(self) -> None:
        self.drain()
        self.wait_for(self.manager.save(self.path(), self.training.state()))

    def before_step(self) -> None:
        with self.manager.lock():
            pass


class Ours(Method):
    """A session, with all that it does at every step and every save."""

    overlap = True
    hooks_began = 0.0

    def run(self, steps: int, save_every: int) -> float:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        if not self.number:
            self.open()
        self.number += 1
        began = time.perf_counter()
        loop = iter(self.session.range(steps, name=str(self.number)))
        self.saving = False
        while True:
            asked = time.perf_counter()
            step = next(loop, None)
            if self.saving:  # the safe point of that step
                self.blocked.append(time.perf_counter() - asked)
            if step is None:
                return time.perf_counter() - began
            if self.number == 1 and step == 0:  # the session's hook is there by now
                self.handles.append(register_optimizer_step_pre_hook(lambda *_: self.after_hooks()))
            self.training.forward_backward()
            self.training.update()
            self.saving = step % save_every == 0
            if self.saving:
                self.session.save()

    def open(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        import spotsafe

        # Hooks run in their order: what is between these two is the session's.
        hook = register_optimizer_step_pre_hook(lambda *_: setattr(self, "hooks_began", time.perf_counter()))
        self.handles = [hook]
        averaged = {} if self.training.averaged is None else {"averaged": self.training.averaged}
        with contextlib.redirect_stderr(io.StringIO()):
            self.session = spotsafe.session(
                self.folder,
                model=self.training.model,
                optimizer=self.training.optimizer,
                save_every=None,
                keep=2,
                watch=None,
                events=self,
                overlap=self.overlap,
                state=averaged,
            ).start()

    def after_hooks(self) -> None:
        if self.saving and self.blocked:
            self.blocked[-1] += time.perf_counter() - self.hooks_began
            self.saving = False

    def emit(self, event: Any) -> None:
        from spotsafe import events

        if isinstance(event, events.SaveStarted):
            self.began = time.perf_counter()
        elif isinstance(event, events.CheckpointPublished):
            self.durable.append(time.perf_counter() - self.began)
        elif isinstance(
            event, events.Warned | events.SaveFailed | events.SaveDiscarded | events.SavePostponed
        ):
            print(event, file=sys.__stderr__)

    def drain(self) -> None:
        self.session.wait()
        while self.handles:  # they are global: whatever trains next in this process would run them
            self.handles.pop().remove()


class OursBlocking(Ours):
    """The same without overlap."""

    overlap = False


METHODS: dict[str, tuple[str, type[Method]]] = {
    "none": ("no save", NoSave),
    "spotsafe": ("spotsafe", Ours),
    "blocking": ("spotsafe, overlap=False", OursBlocking),
    "torch": ("torch.save + fsync", TorchSave),
    "dcp": ("dcp.save", DcpSave),
    "async": ("dcp.async_save", DcpAsync),
    "process": ("dcp.async_save, process and shared memory", DcpProcess),
    "tc": ("torch_checkpointing", TorchCheckpointing),
}


# -- one process ---------------------------------------------------------------------------------------------------


def child(name: str, folder: str, *, width: int, batch: int, saves: int, save_every: int, ema: bool) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    if name in {"dcp", "async", "process", "tc"}:
        dist.init_process_group("gloo", init_method=f"file://{folder}.group", rank=0, world_size=1)
    training = Training(width, batch, ema=ema)
    method = METHODS[name][1](training, folder)
    Path(folder).mkdir()
    method.run(WARM_SAVES * save_every, save_every)
    method.drain()
    method.blocked.clear()
    method.durable.clear()
    memory, cpu = Peak(), cpu_s()
    wall = method.run(saves * save_every, save_every)
    method.drain()
    result = {
        "wall": wall,
        "blocked": method.blocked,
        "durable": method.durable,
        "cpu": cpu_s() - cpu,
        "peak": memory.stop(),
        "nbytes": training.nbytes,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result), flush=True)
    os._exit(0)  # the savers' own ends are not measured


class Peak:
    """The most memory that this process and those below it had, shared pages counted once, in bytes."""

    def __init__(self) -> None:
        self.most, self.ended = 0, threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self) -> None:
        while not self.ended.wait(0.5):
            self.most = max(self.most, sum(map(proportional_bytes, tree())))

    def stop(self) -> int:
        self.ended.set()
        self.thread.join()
        return self.most


def proportional_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


# -- all of them ---------------------------------------------------------------------------------------------------


def calibrated(width: int, seconds: float, make: Callable[[int, int], Training] = Training) -> int:
    """The batch with which a step takes so long."""
    batch = 32
    for _ in range(4):
        training = make(width, batch)

        def step(training: Training = training) -> None:
            training.forward_backward()
            training.update()

        step()
        took = statistics.median(timed(step) for _ in range(5))
        if took >= seconds and batch == 1:
            break
        batch = max(1, round(batch * seconds / took)) if took < 2 * seconds else max(1, batch // 4)
    return batch


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def memcpy_s(nbytes: int) -> float:
    """Seconds of one plain copy of so many bytes by one thread."""
    source, target = ctypes.create_string_buffer(nbytes), ctypes.create_string_buffer(nbytes)
    ctypes.memset(source, 1, nbytes)
    ctypes.memset(target, 1, nbytes)
    return min(timed(lambda: ctypes.memmove(target, source, nbytes)) for _ in range(3))


def measure(
    name: str, folder: Path, arguments: list[str], *, script: str = __file__
) -> dict[str, Any] | None:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, "--case", name, str(folder / name), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    shutil.rmtree(folder / name, ignore_errors=True)
    Path(f"{folder / name}.group").unlink(missing_ok=True)
    if done.returncode != 0 or not done.stdout:
        print(f"{METHODS[name][0]}: failed with {done.returncode}", file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def table(
    seconds: float,
    *,
    width: int,
    saves: int,
    rounds: int,
    names: list[str],
    folder: Path,
    ema: bool = False,
) -> None:
    batch = calibrated(width, seconds, partial(Training, ema=ema))
    save_every = max(3, round(3 / seconds))
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            row = measure(name, folder, [str(width), str(batch), str(saves), str(save_every), str(int(ema))])
            if row is not None:
                rows[name].append(row)
    print_table(rows, seconds=seconds, saves=saves, save_every=save_every)


def print_table(
    rows: dict[str, list[dict[str, Any]]], *, seconds: float, saves: int, save_every: int
) -> None:
    base = rows["none"]
    walls = sorted(row["wall"] for row in base)
    gib = base[0]["nbytes"] / GIB
    step, copy = statistics.median(walls) / (saves * save_every), memcpy_s(base[0]["nbytes"])
    spread = (walls[-1] - walls[0]) / saves
    print(
        f"\n{gib:.2f} GiB of state, steps of {step:.2f} s (wanted {seconds}), a save every {save_every} steps, "
        f"{saves} saves in each of {len(base)} rounds, {base[0]['threads']} threads\n"
        f"loops without saves differ by {spread:.2f} s a save; one memcpy of the state takes {copy:.2f} s"
    )
    heads = f"{'blocked ms':>12s}{'most':>8s}{'added s':>9s}{'/memcpy':>9s}{'durable s':>11s}"
    print(f"{'':44s}{heads}{'CPU s/GiB':>11s}{'GiB more':>10s}")
    for name, found in rows.items():
        if name == "none" or not found:
            continue
        blocked = [one for row in found for one in row["blocked"]]
        durable = [one for row in found for one in row["durable"]]
        added = (statistics.median(row["wall"] for row in found) - statistics.median(walls)) / saves
        cpu = statistics.median(row["cpu"] for row in found) - statistics.median(row["cpu"] for row in base)
        peak = statistics.median(row["peak"] for row in found) - statistics.median(
            row["peak"] for row in base
        )
        print(
            f"{METHODS[name][0]:44s}{statistics.median(blocked) * 1e3:12.1f}{max(blocked) * 1e3:8.0f}{added:9.2f}"
            f"{added / copy:9.1f}{statistics.median(durable):11.2f}{cpu / saves / gib:11.2f}{peak / GIB:10.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", default="0.2,1.0")
    parser.add_argument("--saves", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--width", type=int, default=1800)
    parser.add_argument("--only", default=",".join(METHODS))
    parser.add_argument("--case", nargs="+")
    options = parser.parse_args()
    if options.case:
        name, folder, *numbers = options.case
        width, batch, saves, save_every, ema = map(int, numbers)
        child(name, folder, width=width, batch=batch, saves=saves, save_every=save_every, ema=bool(ema))
    names = ["none", *(name for name in options.only.split(",") if name != "none")]
    common = {"width": options.width, "saves": options.saves, "rounds": options.rounds}
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-") as found:
        folder = Path(found).resolve()
        for seconds in map(float, options.steps.split(",")):
            table(seconds, names=names, folder=folder, **common)
        if "spotsafe" in names:
            print("\nWith an average of all weights, which is saved too:")
            table(1.0, names=["none", "spotsafe"], folder=folder, ema=True, **common)


if __name__ == "__main__":
    main()
