"""Every test here runs on a CUDA device, where there is one, and on the CPU, so that its own code is always run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
    ],
)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the model lies."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this user's runtime files lie, in this test."""
    folder = tmp_path_factory.mktemp("runtime")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder
