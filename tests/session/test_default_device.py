"""A program that makes its tensors on another device by default is saved, resumed and read like any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import spotsafe


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """New tensors are on the meta device, which has no memory: a copy made there by mistake has no values."""
    before = torch.get_default_device()
    torch.set_default_device("meta")
    yield
    torch.set_default_device(before)


@pytest.mark.usefixtures("elsewhere")
def test_saves_resumes_and_loads(tmp_path: Path) -> None:
    """Values come back on the CPU, where they were, from a session, `spotsafe.load` and an export."""
    url, seen = tmp_path / "run", []
    for until in (2, 4):
        model = torch.nn.Linear(3, 3, device="cpu")
        optimizer = torch.optim.AdamW(model.parameters())
        sparse = torch.eye(3, device="cpu").to_sparse()
        with spotsafe.session(url, model=model, optimizer=optimizer, sparse=sparse, save_every=1) as run:
            seen.append(model.weight.detach().clone())
            for _ in run.range(until):
                model(torch.ones(1, 3, device="cpu")).sum().backward()
                optimizer.step()
        seen.append(model.weight.detach().clone())
    assert torch.equal(seen[1], seen[2])
    assert torch.equal(spotsafe.load(url, "model.weight")["model.weight"], seen[3])
    assert spotsafe.load(url)["sparse"].is_cpu
