"""The order as a torch Sampler, for those who keep their own DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import Sampler

from spotsafe.data.order import Cursor, EpochOrder, OrderSpec
from spotsafe.data.permutation import BLOCK


class ResumableSampler(Sampler[int]):
    """Yields the indices of one epoch, from any position at once, in O(1) memory.

    `DataLoader(dataset, sampler=ResumableSampler(dataset), batch_size=32)` can be given to `run.steps`, which
    keeps its position exactly. `ResumableDataLoader` adds what a sampler cannot do: random numbers per
    sample, the epoch inside the workers, workers that outlive a signal to the process group.

    Each `iter()` is the next epoch. `state_dict` counts what was drawn from the sampler: a DataLoader with
    workers draws ahead, so outside of a session save it only between epochs.

    Args:
        data_source: the dataset, or anything with its length.
        shuffle: in keyed random order.
        seed: 0 <= seed < 2**64. The order is a function of it, of the epoch and of the length alone.
        stream: tells apart orders that share a seed.
    """

    def __init__(self, data_source: Sized, *, shuffle: bool = True, seed: int = 0, stream: int = 0) -> None:
        self._spec = OrderSpec(length=len(data_source), shuffle=shuffle, seed=seed, stream=stream)
        self._start = Cursor()
        self._drawn: tuple[int, int] | None = None
        """Epoch and position of the last index drawn since `start_at`."""

    @property
    def order(self) -> OrderSpec:
        """What the order depends on; its micro-batch is one sample."""
        return self._spec

    def start_at(self, cursor: Cursor) -> None:
        """Let the next `iter()` begin at a position."""
        self._start = cursor
        self._drawn = None

    def set_epoch(self, epoch: int) -> None:
        """Let the next `iter()` begin this epoch; nothing changes if it would anyway. Never needed."""
        if self._drawn is not None or epoch != self._start.epoch:
            self.start_at(Cursor(epoch=epoch))

    def state_dict(self) -> dict[str, Any]:
        """The position after the last index that was drawn."""
        return dict(self._spec.state(self._position()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position of `state_dict` with the next `iter()`.

        Raises:
            StateMismatch: it belongs to another order.
        """
        self.start_at(self._spec.cursor(state))

    def __len__(self) -> int:
        return self._spec.length

    def __iter__(self) -> Iterator[int]:
        cursor = self._position()
        if self._drawn is not None and cursor.position:
            cursor = self._spec.following(cursor)
        self.start_at(cursor)
        return self._indices(cursor)

    def _position(self) -> Cursor:
        if self._drawn is None:
            return self._start
        cursor = Cursor(epoch=self._drawn[0], position=self._drawn[1])
        # The end of an epoch and the start of the next are one position.
        return self._spec.following(cursor) if self._spec.ended(cursor) else cursor

    def _indices(self, cursor: Cursor) -> Iterator[int]:
        order = EpochOrder(spec=self._spec, epoch=cursor.epoch)
        for start in range(cursor.position, self._spec.length, BLOCK):
            indices, _ = order.samples(start, min(start + BLOCK, self._spec.length))
            for position, index in enumerate(indices, start=start + 1):
                self._drawn = (cursor.epoch, position)
                yield index
