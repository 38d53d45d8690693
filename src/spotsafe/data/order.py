"""Which samples make up which micro-batch: a pure function of a few numbers, and the position in it.

An epoch is the dataset's indices in the order of `permutation.py` (or 0, 1, 2, ... without shuffle), cut into
micro-batches of `batch_size`. A position is the number of samples of the epoch that are done. Nothing here
knows workers, ranks or the clock, so the same numbers give the same samples anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeGuard

import numpy as np

from spotsafe.data.permutation import (
    BLOCK,
    MAX_LENGTH,
    Int64s,
    Permutation,
    UInt64s,
    counter_random,
    order_key,
    sample_key,
)
from spotsafe.errors import StateMismatch, UnsupportedFormat

ORDER_VERSION = 1
"""Version of the order itself: it changes when the same numbers would give other samples."""

_FINGERPRINT = ("length", "batch_size", "shuffle", "seed", "drop_last", "stream")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A position in the data.

    Attributes:
        epoch: 0-based.
        position: samples of this epoch that are done.
    """

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """One micro-batch as it travels to where it is fetched.

    Attributes:
        epoch: the epoch it belongs to, for datasets with `set_epoch`.
        indices: the dataset's indices.
        seeds: one 64-bit seed for each sample; a function of (seed, stream, epoch, position) only.
    """

    epoch: int
    indices: tuple[int, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSpec:
    """Everything that the order of samples depends on.

    Attributes:
        length: samples in the dataset.
        batch_size: samples in a micro-batch.
        shuffle: in keyed random order, or 0, 1, 2, ...
        seed: 0 <= seed < 2**64.
        drop_last: leave out the short micro-batch at the end of an epoch.
        stream: tells apart orders that share a seed.
    """

    length: int
    batch_size: int = 1
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False
    stream: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.length <= MAX_LENGTH:
            raise ValueError(f"a dataset has 0 to 2**48 samples, not {self.length}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {self.batch_size}")
        for name in ("seed", "stream"):
            if not 0 <= getattr(self, name) < 1 << 64:
                raise ValueError(f"{name} must be in [0, 2**64), not {getattr(self, name)}")

    def batched(self, *, batch_size: int, drop_last: bool) -> OrderSpec:
        """The same order of samples in other micro-batches."""
        return replace(self, batch_size=batch_size, drop_last=drop_last)

    @property
    def samples_per_epoch(self) -> int:
        """Samples that an epoch delivers."""
        return self.length - self.length % self.batch_size if self.drop_last else self.length

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches in an epoch, as `len` of a DataLoader has it."""
        return self.remaining(Cursor())

    def remaining(self, cursor: Cursor) -> int:
        """Micro-batches from the cursor to the end of its epoch."""
        samples = self.samples_per_epoch - cursor.position
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def ended(self, cursor: Cursor) -> bool:
        """Whether the epoch of the cursor has no micro-batch left."""
        return self.remaining(cursor) == 0

    def advance(self, cursor: Cursor, *, batches: int) -> Cursor:
        """The position `batches` micro-batches later in the same epoch.

        Raises:
            ValueError: the epoch has fewer left.
        """
        left = self.remaining(cursor)
        if not 0 <= batches <= left:
            raise ValueError(f"cannot advance by {batches} batches: the epoch has {left} left")
        position = min(cursor.position + batches * self.batch_size, self.samples_per_epoch)
        return Cursor(epoch=cursor.epoch, position=position)

    def following(self, cursor: Cursor) -> Cursor:
        """The start of the next epoch."""
        return Cursor(epoch=cursor.epoch + 1)

    def batches(self, cursor: Cursor) -> Iterator[SampleBatch]:
        """The micro-batches from the cursor to the end of its epoch. Takes no time to start anywhere."""
        return _batches(EpochOrder(spec=self, epoch=cursor.epoch), cursor.position)

    def worker_seed(self, epoch: int) -> int:
        """64 bits for what workers do outside of samples, like `worker_init_fn`."""
        return sample_key(seed=self.seed, epoch=epoch, stream=self.stream)

    def state(self, cursor: Cursor) -> dict[str, int | bool]:
        """The position as plain values, about 100 bytes, the same for any number of workers and ranks."""
        fingerprint = {name: getattr(self, name) for name in _FINGERPRINT}
        return {"version": ORDER_VERSION, "epoch": cursor.epoch, "position": cursor.position, **fingerprint}

    def cursor(self, state: Mapping[str, object]) -> Cursor:
        """The position that `state` holds, once it is sure that it means the same samples here.

        Raises:
            StateMismatch: the dataset's length or an option of the order differs, or it is no such state.
            UnsupportedFormat: saved with a later version of the order.
        """
        _check_version(state)
        problems = [
            f"{name}: saved {state.get(name)!r}, now {getattr(self, name)!r}"
            for name in _FINGERPRINT
            if state.get(name) != getattr(self, name)
        ]
        if problems:
            raise StateMismatch(_mismatch_text(problems), problems=problems)
        return self._placed(state.get("epoch"), state.get("position"))

    def _placed(self, epoch: object, position: object) -> Cursor:
        if is_count(epoch) and is_count(position) and position <= self.samples_per_epoch:
            return Cursor(epoch=epoch, position=position)
        problem = f"position {position!r} in epoch {epoch!r} does not exist in {self}"
        raise StateMismatch(f"the saved data position cannot be right: {problem}", problems=[problem])


class EpochOrder:
    """The samples of one epoch. Holds one block of the order at a time.

    Args:
        spec: the order.
        epoch: which epoch of it.
    """

    __slots__ = ("_block", "_first", "_permutation", "_seed_key", "epoch", "spec")

    def __init__(self, *, spec: OrderSpec, epoch: int) -> None:
        self.spec = spec
        self.epoch = epoch
        key = order_key(seed=spec.seed, epoch=epoch, stream=spec.stream)
        self._permutation = Permutation(spec.length, key) if spec.shuffle else None
        self._seed_key = sample_key(seed=spec.seed, epoch=epoch, stream=spec.stream)
        self._first = 0
        self._block: tuple[Int64s, UInt64s] | None = None

    def samples(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        """Indices and seeds of the samples at positions [start, stop)."""
        indices: list[int] = []
        seeds: list[int] = []
        while start < stop:
            block_indices, block_seeds = self._load(start)
            begin, end = start - self._first, min(stop - self._first, BLOCK)
            indices += block_indices[begin:end].tolist()
            seeds += block_seeds[begin:end].tolist()
            start = self._first + end
        return indices, seeds

    def batch(self, position: int) -> SampleBatch:
        """The micro-batch that starts at `position`."""
        stop = min(position + self.spec.batch_size, self.spec.samples_per_epoch)
        indices, seeds = self.samples(position, stop)
        return SampleBatch(epoch=self.epoch, indices=tuple(indices), seeds=tuple(seeds))

    def _load(self, position: int) -> tuple[Int64s, UInt64s]:
        """The aligned block around `position`; computing each batch alone would cost far more."""
        first = position - position % BLOCK
        if self._block is None or self._first != first:
            stop = min(first + BLOCK, self.spec.length)
            indices = (
                np.arange(first, stop, dtype=np.int64)
                if self._permutation is None
                else self._permutation.block(first, stop)
            )
            self._block = (indices, counter_random(self._seed_key, start=first, stop=stop))
            self._first = first
        return self._block


def _batches(order: EpochOrder, position: int) -> Iterator[SampleBatch]:
    cursor = Cursor(epoch=order.epoch, position=position)
    while not order.spec.ended(cursor):
        yield order.batch(cursor.position)
        cursor = order.spec.advance(cursor, batches=1)


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value read from a state is a whole number that can count something."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_version(state: Mapping[str, object]) -> None:
    version = state.get("version")
    if not is_count(version):
        raise StateMismatch("this is not the saved position of a ResumableDataLoader: it has no version")
    if version != ORDER_VERSION:
        raise UnsupportedFormat(
            f"the data position has version {version}, this spotsafe knows {ORDER_VERSION}: "
            "use the spotsafe that wrote it, or start a new run",
            found=str(version),
        )


def _mismatch_text(problems: list[str]) -> str:
    return (
        "the data position of the checkpoint belongs to another order of samples ("
        + "; ".join(problems)
        + "). Give the loader the saved values; or accept that samples repeat or are missed, with "
        'resume_data="epoch" (this epoch again from its start) or resume_data="fresh"; or start a new run'
    )
