"""What saving costs a device: no memory that stays, none for a copy, and no context of the writer's."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

import spotsafe
from spotsafe.writer.process import can_run
from tests.session.rig import MANY_STARTS
from tests.writer.processes import the_writer

LAYERS, WIDTH = 4, 256
STATE_BYTES = 3 * LAYERS * (WIDTH + 1) * WIDTH * 4


def held(device: torch.device) -> int:
    """Bytes of tensors on the device; on the CPU of the plain ones that Python can find, other tests' too."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    plain = [one for one in gc.get_objects() if type(one) in {torch.Tensor, torch.nn.Parameter}]
    storages = [
        one.untyped_storage() for one in plain if one.layout is torch.strided and one.device == device
    ]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


class Peak:
    """Bytes that are on the device at most, beyond those at the beginning; only CUDA counts them."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)

    @property
    def nbytes(self) -> int:
        """Since the beginning."""
        counts = self._device.type == "cuda"
        return torch.cuda.max_memory_allocated(self._device) - self._before if counts else 0


@pytest.mark.slow
def test_many_saves_leave_nothing_on_the_device(device: torch.device, tmp_path: Path) -> None:
    """As much is there after the last as after the fifth, and no save makes a copy there of what it saves."""
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    inputs = torch.ones(8, WIDTH, device=device)
    saves = 50 if device.type == "cuda" else 8
    after, most, peak = list[int](), 0, Peak(device)
    with spotsafe.session(
        str(tmp_path),
        model=model,
        optimizer=optimizer,
        save_every=1,
        watch=None,
        writer="thread",
        restart_limits=MANY_STARTS,
    ) as run:
        for step in run.range(saves + 1):
            if step:
                run.wait()
                most = max(most, peak.nbytes)
            if step in {5, saves}:
                after.append(held(device))
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
            peak = Peak(device)
    assert after[0] == after[1] > 0
    assert most < STATE_BYTES // 10


@pytest.mark.skipif(not can_run(), reason="this system cannot have a writer process")
def test_the_writer_has_no_context_on_the_device(device: torch.device, tmp_path: Path) -> None:
    """A context would take half a gigabyte of it: the process sees no device, has none open, and loads no driver."""
    weight = torch.zeros(1 << 10, device=device)
    with spotsafe.session(
        str(tmp_path), save_every=1, watch=None, writer="process", state={"weight": weight}
    ) as run:
        for _ in run.range(3):
            weight += 1
            run.wait()
        pid = the_writer()
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        maps = Path(f"/proc/{pid}/maps").read_text()
        files = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
    assert b"CUDA_VISIBLE_DEVICES=" in environment
    assert "libcuda" not in maps
    assert "/dev/nvidia" not in maps
    assert not [one for one in files if one.startswith("/dev/nvidia")]
    assert spotsafe.load(str(tmp_path), "weight")["weight"].unique().tolist() == [3.0]
