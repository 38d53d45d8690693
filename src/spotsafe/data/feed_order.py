"""The feed of a loader in our own order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from spotsafe.data.feed_state import Warn, closing, count_in, epoch_to_repeat, state_of_kind
from spotsafe.data.order import Cursor, OrderSpec
from spotsafe.data.sampler import ResumableSampler
from spotsafe.errors import LoaderNotResumable, RunError, StateMismatch, UnsupportedFormat


class OrderFeed:
    """A loader in our order: the position is a number of samples, and work starts right there.

    `resume_data` counts only if the saved position means other samples: "epoch" and "fresh" then start the
    saved epoch from its start, with a warning; without either it is an error.

    Args:
        order: the order, in micro-batches of the loop.
        open_at: makes an iterator from a position to the end of its epoch.
        resume_data: see above.
        warn: called with one line for a person.
    """

    def __init__(
        self,
        order: OrderSpec,
        open_at: Callable[[Cursor], Iterator[Any]],
        *,
        resume_data: str | None,
        warn: Warn,
    ) -> None:
        self._order = order
        self._open_at = open_at
        self._resume_data = resume_data
        self._warn = warn
        self._cursor = Cursor()
        self._samples = 0  # over all epochs

    @classmethod
    def of_sampler(
        cls, loader: DataLoader[Any], sampler: ResumableSampler, *, resume_data: str | None, warn: Warn
    ) -> OrderFeed:
        """For a torch DataLoader that was given a `ResumableSampler`.

        Raises:
            LoaderNotResumable: it delivers out of order.
        """
        if not getattr(loader, "in_order", True):
            raise LoaderNotResumable("a DataLoader with in_order=False has no position: use in_order=True")
        order = sampler.order.batched(batch_size=loader.batch_size or 1, drop_last=loader.drop_last)

        def open_at(cursor: Cursor) -> Iterator[Any]:
            sampler.start_at(cursor)
            return closing(loader, iter(loader))

        return cls(order, open_at, resume_data=resume_data, warn=warn)

    def start(self) -> Iterator[Any]:
        """An iterator from the committed position to the end of the epoch."""
        return _Whole(self._open_at(self._cursor), self._order.remaining(self._cursor))

    def committed(self, batches: int) -> None:
        """Move the position."""
        moved = self._order.advance(self._cursor, batches=batches)
        self._samples += moved.position - self._cursor.position
        self._cursor = moved

    @property
    def ended(self) -> bool:
        """Whether the position is the end of the epoch."""
        return self._order.ended(self._cursor)

    def remaining(self) -> int:
        """Micro-batches to the end of the epoch."""
        return self._order.remaining(self._cursor)

    def finish_epoch(self) -> None:
        """Move to the start of the next epoch."""
        self._cursor = self._order.following(self._cursor)

    @property
    def epoch(self) -> int:
        """The epoch of the position."""
        return self._cursor.epoch

    def state(self) -> dict[str, Any]:
        """About 150 bytes, whatever the dataset and the number of workers."""
        return {"kind": "order", "samples": self._samples, **self._order.state(self._cursor)}

    def place_of(self, state: Any) -> tuple[int, int] | None:
        """Epoch and samples of a saved position, if everything that the order depends on is the same."""
        try:
            cursor = self._order.cursor(state_of_kind(state, "order"))
        except (StateMismatch, UnsupportedFormat):
            return None
        return cursor.epoch, cursor.position

    def load(self, state: Any) -> None:
        """Move to a saved position."""
        try:
            cursor = self._order.cursor(state_of_kind(state, "order"))
        except StateMismatch as error:
            cursor = Cursor(epoch=epoch_to_repeat(state, error, choice=self._resume_data, warn=self._warn))
        self._cursor = cursor
        self._samples = count_in(state, "samples")


class _Whole(Iterator[Any]):
    """Does not take a StopIteration that comes out of the dataset for the end of the epoch."""

    def __init__(self, batches: Iterator[Any], count: int) -> None:
        self._batches = batches
        self._left = count

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            if self._left > 0:
                raise RunError(
                    f"the loader ended {self._left} batches before the end of its epoch: the dataset or the collate "
                    "function raised StopIteration (a next() on an iterator that is used up?), which Python takes "
                    "for the end of the data"
                ) from None
            raise
        self._left -= 1
        return batch

    def close(self) -> None:
        """End it and its workers."""
        self._left = 0
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()
