"""A dataset that leaves a trace of every fetch, also from workers, and random numbers in every sample."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset


class Traced(Dataset):
    """Sample i is (i, and one random number of each kind); every fetch of it is a line in a file."""

    def __init__(self, length: int, trace: Path) -> None:
        self.length = length
        self.trace = trace

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        if index < 0 or index >= self.length:
            raise IndexError(index)
        assert type(index) is int
        self.note(str(index))
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))

    def note(self, line: str) -> None:
        """Append a line; one write, so that lines of several processes do not mix."""
        handle = os.open(self.trace, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, f"{line}\n".encode())
        os.close(handle)

    def fetched(self) -> list[int]:
        """The indices that were fetched, by any process, in no order."""
        return sorted(int(line) for line in self.trace.read_text().split()) if self.trace.exists() else []


def as_rows(batch: list[torch.Tensor]) -> list[tuple[float, ...]]:
    """A collated batch as plain numbers, exactly."""
    return list(zip(*(column.tolist() for column in batch), strict=True))
