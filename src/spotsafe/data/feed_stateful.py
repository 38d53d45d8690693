"""The feed of a loader with `state_dict` and `load_state_dict`, like torchdata's StatefulDataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spotsafe.data.feed_state import ForeignFeed, Warn, count_in, epoch_to_repeat, state_of_kind
from spotsafe.data.loader import BatchIterator
from spotsafe.errors import StateMismatch


class StatefulFeed(ForeignFeed):
    """A loader that keeps its own position by `state_dict` and `load_state_dict`.

    Its state counts yielded batches. It is taken when all yielded batches are committed: when asked for
    then, and else as it was before the first uncommitted batch was fetched.

    Args:
        loader: the user's loader.
        resume_data: counts only if the saved position is of another kind of loader: "epoch" and "fresh" then
            begin anew.
        warn: called with one line for a person.
    """

    def __init__(self, loader: Any, *, resume_data: str | None, warn: Warn) -> None:
        super().__init__(loader, warn=warn)
        self._resume_data = resume_data
        self._uncommitted = 0
        self._known: Any = None
        """The loader's state at the committed position; None: as the program made it."""
        self._to_load = False
        self._exhausted = True
        self._leave_epoch = False
        self._live = False

    def start(self) -> Iterator[Any]:
        """An iterator from the committed position, as the loader itself continues."""
        if self._to_load:
            self._loader.load_state_dict(self._known)
            self._to_load = False
            if (
                self._leave_epoch
            ):  # take up the unfinished epoch and let go of it: the next `iter` is a new one
                self._iterator().close()
        self._leave_epoch = False
        self._uncommitted = 0
        self._exhausted = False
        batches = _Watched(self._iterator(), self)
        self._live = True
        return batches

    def committed(self, batches: int) -> None:
        """Count what was committed of what was yielded."""
        self._uncommitted -= batches

    @property
    def ended(self) -> None:
        """Only the iterator knows."""
        return None

    def remaining(self) -> None:
        """Not known."""
        return

    def finish_epoch(self) -> None:
        """Move to the next epoch."""
        self._leave_epoch = not self._exhausted
        self._exhausted = True
        self._epoch += 1

    def state(self) -> dict[str, Any]:
        """What the loader says, and in which epoch."""
        self.remember()
        return {
            "kind": "stateful",
            "epoch": self._epoch,
            "loader": self._known,
            "exhausted": self._exhausted,
            "leave": self._leave_epoch,
        }

    def load(self, state: Any) -> None:
        """Let the loader continue there at the next `start`."""
        try:
            saved = state_of_kind(state, "stateful")
        except StateMismatch as error:
            self._epoch = epoch_to_repeat(state, error, choice=self._resume_data, warn=self._warn)
            return
        self._epoch = count_in(saved, "epoch")
        self._known = saved.get("loader")
        self._exhausted = bool(saved.get("exhausted"))
        self._leave_epoch = bool(saved.get("leave"))
        self._to_load = self._known is not None
        self._live = False

    def remember(self) -> None:
        """Take the loader's state, if it is that of the committed position."""
        if self._live and not self._uncommitted:
            self._known = self._loader.state_dict()

    def yielded(self) -> None:
        """A batch is on its way to the loop."""
        self._uncommitted += 1

    def exhausted(self) -> None:
        """The loader has come to the end of its epoch."""
        self._exhausted = True


class _Watched(Iterator[Any]):
    """Tells a `StatefulFeed` what its loader does."""

    def __init__(self, batches: BatchIterator, feed: StatefulFeed) -> None:
        self._batches = batches
        self._feed = feed

    def __next__(self) -> Any:
        self._feed.remember()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._feed.exhausted()
            raise
        self._feed.yielded()
        return batch

    def close(self) -> None:
        """End it and its workers."""
        self._batches.close()
