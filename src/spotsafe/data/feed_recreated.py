"""The feed of a loader that knows nothing of positions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from spotsafe.data.feed_state import ForeignFeed, Warn, count_in, epoch_to_repeat, state_of_kind
from spotsafe.data.loader import BatchIterator
from spotsafe.errors import StateMismatch
from spotsafe.tensors.rng import Json, RngSnapshot, capture_rng, decode_bytes, encode_bytes


class RecreatedFeed(ForeignFeed):
    """A loader that knows nothing of positions; the iterator is made again after a resume.

    Args:
        loader: any iterable.
        mode: "skip", "epoch" or "fresh", see `feed_for`.
        sized: its `len` can be trusted to be the number of batches.
        warn: called with one line for a person.
    """

    def __init__(self, loader: Iterable[Any], *, mode: str, sized: bool, warn: Warn) -> None:
        super().__init__(loader, warn=warn)
        self._mode = mode
        self._length = len(loader) if sized else None  # type: ignore[arg-type] # map-style DataLoaders have one
        self._batches = 0
        self._origin: _Origin | None = None
        """The generators just before the epoch's iterator was made, and thus the order."""
        self._live = False

    def start(self) -> Iterator[Any]:
        """A new iterator; in mode "skip", behind what was committed, in the same order as before."""
        self._live = True
        if self._mode == "fresh":
            self._batches = 0
            return self._iterator()
        if self._origin is None:
            self._origin = _Origin.capture(self._loader)
            return self._iterator()
        if self._mode == "epoch":
            self._batches = 0
        now = capture_rng()
        self._origin.restore(self._loader)
        iterator = self._iterator()
        self._skip(iterator)
        if not self._batches:
            iterator.peek()  # samplers draw their order with the first batch, not when the iterator is made
        now.restore()
        return iterator

    def _skip(self, iterator: BatchIterator) -> None:
        for done in range(self._batches):
            try:
                next(iterator)
            except StopIteration:
                raise StateMismatch(
                    f"{self._batches} batches of epoch {self._epoch} are done, but the loader now ends after "
                    f'{done}: its data has changed. Use resume_data="epoch" or "fresh", or start a new run'
                ) from None

    def committed(self, batches: int) -> None:
        """Count."""
        self._batches += batches

    @property
    def ended(self) -> bool | None:
        """Whether so many batches are done as the loader has."""
        return None if self._length is None else self._batches >= self._length

    def remaining(self) -> int | None:
        """Batches to the end of the epoch, if the loader's length is known."""
        return None if self._length is None else max(0, self._length - self._batches)

    def finish_epoch(self) -> None:
        """Move to the start of the next epoch."""
        self._epoch, self._batches, self._origin = self._epoch + 1, 0, None

    def state(self) -> dict[str, Any]:
        """The count and, unless "fresh", the generators from which the order was made."""
        origin = self._origin.to_state() if self._origin is not None and self._batches else None
        own = [] if self._mode == "fresh" else _own_states(self._loader)
        return {
            "kind": "recreated",
            "epoch": self._epoch,
            "batches": self._batches,
            "origin": origin,
            "own": [encode_bytes(one) for one in own],
        }

    def load(self, state: Any) -> None:
        """Move to a saved position, as far as the mode allows."""
        try:
            saved = state_of_kind(state, "recreated")
            batches, origin = count_in(saved, "batches"), saved.get("origin")
            if self._mode == "skip" and batches and origin is None:
                raise StateMismatch(
                    'the checkpoint was saved with resume_data="fresh", which keeps not what "skip" needs: '
                    'resume with "epoch" or "fresh"'
                )
            own = _decoded(saved.get("own"))
            self._origin = None if origin is None else _Origin.from_state(origin)
        except StateMismatch as error:
            self._epoch = epoch_to_repeat(state, error, choice=self._mode, warn=self._warn)
            self._batches, self._origin = 0, None
            return
        self._epoch, self._batches = count_in(saved, "epoch"), batches
        if not self._live and self._mode != "fresh" and own:
            # For the next epoch's order, if this one is at its end and no iterator of it will be made.
            _set_own(self._loader, own)


class _Origin:
    """The random number generators from which a DataLoader makes its order, just before it does."""

    def __init__(self, process: RngSnapshot, own: list[torch.Tensor]) -> None:
        self._process = process
        self._own = own

    @classmethod
    def capture(cls, loader: object) -> _Origin:
        """Of the process, and those that the loader and its samplers have for themselves."""
        return cls(capture_rng(), _own_states(loader))

    def restore(self, loader: object) -> None:
        """Set them all.

        Raises:
            StateMismatch: the loader has other generators than when it was saved.
        """
        _set_own(loader, self._own)
        self._process.restore()

    def to_state(self) -> Json:
        """Plain values."""
        return {"process": self._process.to_state(), "own": [encode_bytes(state) for state in self._own]}

    @classmethod
    def from_state(cls, state: Json) -> _Origin:
        """The inverse.

        Raises:
            StateMismatch: it is not such a state.
        """
        try:
            return cls(RngSnapshot.from_state(state["process"]), _decoded(state["own"]))
        except (ValueError, KeyError, TypeError) as error:
            raise StateMismatch(f"the saved generators of the loader cannot be read: {error}") from error


def _decoded(states: Any) -> list[torch.Tensor]:
    try:
        return [decode_bytes(one) for one in states]
    except (ValueError, TypeError) as error:
        raise StateMismatch(f"the saved generators of the loader cannot be read: {error}") from error


def _own_states(loader: object) -> list[torch.Tensor]:
    return [generator.get_state() for generator in _own_generators(loader)]


def _set_own(loader: object, states: list[torch.Tensor]) -> None:
    generators = _own_generators(loader)
    if len(generators) != len(states):
        raise StateMismatch(
            f"the loader had {len(states)} torch.Generator of its own when it was saved, now it has "
            f"{len(generators)}: give it the same generator="
        )
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _own_generators(loader: object) -> list[torch.Generator]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    found = [getattr(holder, "generator", None) for holder in holders]
    unique = {id(one): one for one in found if isinstance(one, torch.Generator)}
    return list(unique.values())
