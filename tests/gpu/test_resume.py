"""A run with mixed precision that is cut and resumed ends with the bits of one that is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import spotsafe
from tests.session.rig import MANY_STARTS, Cut

STEPS = 9


class Mixed:
    """Autocast, a gradient scaler that grows and backs off, dropout on the device, and an average."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.half = torch.float16 if device.type == "cuda" else torch.bfloat16
        self.model = nn.Sequential(
            nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 1)
        ).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=2)
        self.seen: list[tuple[int, str, float]] = []
        """Of each step its loss, in bits, and the scale."""

    def train(self, step: int) -> None:
        inputs = torch.randn(16, 64, device=self.device)  # of the device's own generator
        with torch.autocast(self.device.type, dtype=self.half):
            loss = self.model(inputs).float().square().mean()
        if step == 4:
            loss = loss * float("inf")  # a step that the scaler leaves out
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.seen.append((step, loss.item().hex(), self.scaler.get_scale()))

    def tensors(self) -> list[torch.Tensor]:
        """All that training has left."""
        state = [one for of in self.optimizer.state_dict()["state"].values() for one in of.values()]
        return [one.detach().cpu() for one in (*self.model.state_dict().values(), *state)]

    def run(self, url: Path, *, cut: int | None = None) -> None:
        tracked = {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "scaler")}
        with spotsafe.session(
            str(url), save_every=1, watch=None, writer="thread", restart_limits=MANY_STARTS, **tracked
        ) as run:
            for step in run.range(STEPS):
                self.train(step)
                run.wait()
                if step == cut:
                    raise Cut


@pytest.fixture
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a device, too, the same program computes the same bits."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("repeatable")
@pytest.mark.filterwarnings(
    "ignore:Detected call of `lr_scheduler.step:UserWarning"
)  # behind a step left out
@pytest.mark.parametrize(
    "cut", [4, pytest.param(1, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow)]
)
def test_a_resume_is_exact(device: torch.device, tmp_path: Path, cut: int) -> None:
    """Weights, moments, running means, the scale and the random numbers of the device."""
    whole = Mixed(device)
    whole.run(tmp_path / "whole")
    first, second = Mixed(device), Mixed(device)
    with pytest.raises(Cut):
        first.run(tmp_path / "cut", cut=cut)
    second.run(tmp_path / "cut")
    assert second.seen == whole.seen[second.seen[0][0] :]
    assert 0 < second.seen[0][0] <= cut
    assert len({scale for _, _, scale in whole.seen}) > 2
    assert all(map(torch.equal, second.tensors(), whole.tensors()))
    assert {one.device.type for one in second.model.state_dict().values()} == {device.type}
