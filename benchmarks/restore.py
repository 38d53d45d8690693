"""How fast a state comes back, verified, beside what others do unverified.

    python benchmarks/restore.py [--width 1800] [--repeats 5]

The state is that of linear layers with AdamW. Each method has written it in its own form to the local disk, and reads
it in a process of its own, with a cold and with a warm page cache, turn by turn; modules are imported before. Every
byte is touched: what is only mapped is summed up. The first half gives tensors; the second half ends with the state in
a model and an optimizer, as a resume needs it. *Raw* reads as many bytes by as many threads into the same kind of
memory, and does nothing with them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from save_cost import GIB, Training
from store import ROOT, cpu_s, forget_cache, read_raw

READERS = {
    "raw": "raw",
    "load": "spotsafe.load",
    "torch": "torch.load",
    "safetensors": "safetensors",
    "resume": "spotsafe.session",
    "torch_into": "torch.load, load_state_dict",
    "dcp_into": "dcp.load, load_state_dict",
}
FORMS = {"torch": "pt", "torch_into": "pt", "safetensors": "safetensors", "dcp_into": "dcp"}


def write_all(folder: Path, width: int) -> int:
    """The same state in every form; its bytes."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    import spotsafe

    training = Training(width, 1)
    with spotsafe.session(
        str(folder / "run"), model=training.model, optimizer=training.optimizer, save_every=None
    ) as run:
        for _ in run.range(1):
            training.forward_backward()
            training.optimizer.step()
            run.save()
    state = training.state()
    (folder / "pt").mkdir()
    torch.save(state, folder / "pt" / "state.pt")
    dcp.save(state, checkpoint_id=folder / "dcp")
    flat = {f"model.{key}": value for key, value in state["model"].items()}
    for at, values in state["optimizer"]["state"].items():
        flat.update({f"optimizer.{at}.{key}": value for key, value in values.items()})
    (folder / "safetensors").mkdir()
    save_file(flat, folder / "safetensors" / "state.safetensors")
    return training.nbytes


def files_of(folder: Path, name: str) -> list[Path]:
    if name in FORMS:
        return [path for path in (folder / FORMS[name]).rglob("*") if path.is_file()]
    return sorted((folder / "run" / "checkpoints").glob("*/data*"))


def touched(values: Any) -> None:
    """Read every byte: some of them may only be mapped."""
    import torch

    if isinstance(values, torch.Tensor):
        values.view(-1).view(torch.uint8).sum() if values.dim() else values.item()
    elif isinstance(values, dict):
        for value in values.values():
            touched(value)


def reader(name: str, folder: Path, width: int) -> Callable[[], Any]:
    """What is measured; what it needs besides is made before."""
    import torch

    if name == "raw":
        files = files_of(folder, name)
        return lambda: read_raw(files)
    if name == "load":
        from spotsafe import load

        return lambda: load(folder / "run")
    if name == "torch":
        return lambda: torch.load(folder / "pt" / "state.pt", weights_only=True)
    if name == "safetensors":
        from safetensors.torch import load_file

        return lambda: touched(load_file(folder / "safetensors" / "state.safetensors"))
    training = Training(width, 1)
    return {"resume": resume, "torch_into": torch_into, "dcp_into": dcp_into}[name](folder, training)


def resume(folder: Path, training: Training) -> Callable[[], Any]:
    from spotsafe import session

    def enter() -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            run = session(
                str(folder / "run"),
                model=training.model,
                optimizer=training.optimizer,
                watch=None,
                save_every=None,
            )
            run.start()
            assert run.resumed_from is not None

    return enter


def torch_into(folder: Path, training: Training) -> Callable[[], Any]:
    import torch

    def load() -> None:
        state = torch.load(folder / "pt" / "state.pt", weights_only=True)
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])

    return load


def dcp_into(folder: Path, training: Training) -> Callable[[], Any]:
    import torch.distributed.checkpoint as dcp

    training.forward_backward()
    training.optimizer.step()  # it loads into what is there

    def load() -> None:
        state = training.state()
        dcp.load(state, checkpoint_id=folder / "dcp")
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])

    return load


def child(name: str, folder: Path, *, width: int, cold: bool) -> None:
    warnings.simplefilter("ignore")
    work = reader(name, folder, width)
    for file in files_of(folder, name):
        if cold:
            forget_cache(file)
        else:
            file.read_bytes()
    cpu, began = cpu_s(), time.perf_counter()
    result = work()
    took = time.perf_counter() - began
    print(json.dumps({"s": took, "cpu": cpu_s() - cpu}), flush=True)
    del result
    os._exit(0)


def measure(name: str, folder: Path, *, width: int, cold: bool) -> dict[str, float]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    case = ["--case", name, str(folder), str(width), str(int(cold))]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, *case],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def table(folder: Path, *, width: int, repeats: int) -> None:
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gib = write_all(folder, width) / GIB
    for cold in (True, False):
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in READERS}
        for _ in range(repeats):
            for name, found in rows.items():
                found.append(measure(name, folder, width=width, cold=cold))
        raw = statistics.median(row["s"] for row in rows["raw"])
        print(f"\n{gib:.2f} GiB, {'cold' if cold else 'warm'} page cache")
        print(f"{'':34s}{'MiB/s':>8s}{'of raw':>8s}{'CPU s/GiB':>11s}")
        for name, found in rows.items():
            seconds = statistics.median(row["s"] for row in found)
            cpu = statistics.median(row["cpu"] for row in found) / gib
            print(f"{READERS[name]:34s}{gib * 1024 / seconds:8.0f}{raw / seconds:8.2f}{cpu:11.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1800)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", nargs=4)
    options = parser.parse_args()
    if options.case:
        name, folder, width, cold = options.case
        child(name, Path(folder), width=int(width), cold=cold == "1")
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-") as folder:
        table(Path(folder).resolve(), width=options.width, repeats=options.repeats)


if __name__ == "__main__":
    main()
