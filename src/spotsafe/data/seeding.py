"""Fetching samples so that their random numbers depend on nothing but their place in the order.

`SeededDataset` stands between DataLoader and the user's dataset, in the worker or in the training process. It
takes a whole micro-batch at once (`SampleBatch`), seeds python's, numpy's and torch's CPU generator for each
sample, fetches, and collates. In the training process the generators are put back afterwards, so that the
training's own random numbers do not know that data was loaded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from spotsafe.data.order import SampleBatch
from spotsafe.tensors.rng import capture_rng

_MASK64 = (1 << 64) - 1


def seed_host_rng(seed: int) -> None:
    """Seed python's `random`, numpy's global and torch's CPU generator; those of devices are left alone.

    All three are Mersenne Twisters, and the same number given to two of them in the same way makes them yield
    the same stream. So numpy gets the upper half of the seed and torch, which reads only 32 bits, the lower half;
    python takes all of it, in a way of its own. (An array for numpy would be six times as slow.)

    Args:
        seed: 64 bits.
    """
    random.seed(seed)
    np.random.seed(seed >> 32)
    torch.default_generator.manual_seed(seed & 0xFFFFFFFF)


@contextmanager
def host_rng_kept() -> Iterator[None]:
    """Put python's, numpy's and torch's CPU generator back afterwards, whatever was done with them."""
    before = replace(capture_rng(), cuda=())
    try:
        yield
    finally:
        before.restore()


class SeededDataset(Dataset[Any]):
    """Fetches and collates whole micro-batches of a map-style dataset, each sample under its own seed.

    A dataset with `__getitems__` is asked once, under the seed of the batch's first sample. A dataset with
    `set_epoch(epoch)` is told the epoch in the process that fetches, before the first sample of it. The
    collate function runs under a seed of the batch, so random collation (masking, mixing) repeats as well.

    Args:
        dataset: the user's dataset.
        collate_fn: what DataLoader would call: with a list of samples, or with one sample if not `batched`.
        batched: false for `batch_size=None`.
    """

    def __init__(self, dataset: Any, *, collate_fn: Callable[[Any], Any], batched: bool) -> None:
        self.dataset = dataset
        self._collate_fn = collate_fn
        self._batched = batched
        self._epoch: int | None = None

    def __getitem__(self, batch: SampleBatch) -> Any:
        with _rng_scope():
            self._enter_epoch(batch.epoch)
            samples = self._fetch(batch.indices, batch.seeds)
            seed_host_rng(batch.seeds[0] ^ _MASK64)
            return self._collate_fn(samples if self._batched else samples[0])

    def _fetch(self, indices: Sequence[int], seeds: Sequence[int]) -> Sequence[Any]:
        at_once = getattr(self.dataset, "__getitems__", None) if self._batched else None
        if at_once is not None:
            seed_host_rng(seeds[0])
            fetched: Sequence[Any] = at_once(list(indices))
            return fetched
        samples = []
        for index, seed in zip(indices, seeds, strict=True):
            seed_host_rng(seed)
            samples.append(self.dataset[index])
        return samples

    def _enter_epoch(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        self._epoch = epoch


def _rng_scope() -> AbstractContextManager[None]:
    """In a worker the generators belong to the samples; in the training process they are borrowed."""
    return nullcontext() if get_worker_info() is not None else host_rng_kept()
