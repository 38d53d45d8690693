"""The kinds of feeds. See `feed` for what they have in common and which is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from spotsafe.data.loader import BatchIterator
from spotsafe.data.order import Cursor, OrderSpec, is_count
from spotsafe.data.sampler import ResumableSampler
from spotsafe.errors import LoaderNotResumable, StateMismatch
from spotsafe.tensors.rng import Json, RngSnapshot, capture_rng, decode_bytes, encode_bytes

Warn = Callable[[str], None]


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
        self._samples = 0

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
        return self._open_at(self._cursor)

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

    def samples(self) -> int:
        """Samples committed over all epochs."""
        return self._samples

    def state(self) -> dict[str, Any]:
        """About 150 bytes, whatever the dataset and the number of workers."""
        return {"kind": "order", "samples": self._samples, **self._order.state(self._cursor)}

    def load(self, state: Any) -> None:
        """Move to a saved position."""
        try:
            cursor = self._order.cursor(_of_kind(state, "order"))
        except StateMismatch as error:
            cursor = Cursor(epoch=_epoch_to_repeat(state, error, choice=self._resume_data, warn=self._warn))
        self._cursor = cursor
        self._samples = _count(state, "samples")


class StatefulFeed:
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
        self._loader = loader
        self._resume_data = resume_data
        self._warn = warn
        self._epoch = 0
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
                closing(self._loader, iter(self._loader)).close()
        self._leave_epoch = False
        self._uncommitted = 0
        self._exhausted = False
        batches = _Watched(closing(self._loader, iter(self._loader)), self)
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

    @property
    def epoch(self) -> int:
        """Epochs finished."""
        return self._epoch

    def samples(self) -> int:
        """Not known."""
        return 0

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
            saved = _of_kind(state, "stateful")
        except StateMismatch as error:
            self._epoch = _epoch_to_repeat(state, error, choice=self._resume_data, warn=self._warn)
            return
        self._epoch = _count(saved, "epoch")
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


class RecreatedFeed:
    """A loader that knows nothing of positions; the iterator is made again after a resume.

    Args:
        loader: any iterable.
        mode: "skip", "epoch" or "fresh", see `feed_for`.
        sized: its `len` can be trusted to be the number of batches.
        warn: called with one line for a person.
    """

    def __init__(self, loader: Iterable[Any], *, mode: str, sized: bool, warn: Warn) -> None:
        self._loader = loader
        self._mode = mode
        self._length = len(loader) if sized else None  # type: ignore[arg-type] # map-style DataLoaders have one
        self._warn = warn
        self._epoch = 0
        self._batches = 0
        self._origin: _Origin | None = None
        """The generators just before the epoch's iterator was made, and thus the order."""

    def start(self) -> Iterator[Any]:
        """A new iterator; in mode "skip", behind what was committed, in the same order as before."""
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
        now.restore()
        return iterator

    def _iterator(self) -> BatchIterator:
        return closing(self._loader, iter(self._loader))

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

    @property
    def epoch(self) -> int:
        """Epochs finished."""
        return self._epoch

    def samples(self) -> int:
        """Not known."""
        return 0

    def state(self) -> dict[str, Any]:
        """The count and, unless "fresh", the generators from which the order was made."""
        origin = self._origin.to_state() if self._origin is not None and self._batches else None
        return {"kind": "recreated", "epoch": self._epoch, "batches": self._batches, "origin": origin}

    def load(self, state: Any) -> None:
        """Move to a saved position, as far as the mode allows."""
        try:
            saved = _of_kind(state, "recreated")
            batches, origin = _count(saved, "batches"), saved.get("origin")
            if self._mode == "skip" and batches and origin is None:
                raise StateMismatch(
                    'the checkpoint was saved with resume_data="fresh", which does not keep what "skip" needs: '
                    'resume with "epoch" or "fresh"'
                )
            self._origin = None if origin is None else _Origin.from_state(origin)
        except StateMismatch as error:
            self._epoch = _epoch_to_repeat(state, error, choice=self._mode, warn=self._warn)
            self._batches, self._origin = 0, None
            return
        self._epoch, self._batches = _count(saved, "epoch"), batches


class _Origin:
    """The random number generators from which a DataLoader makes its order, just before it does."""

    def __init__(self, process: RngSnapshot, own: list[torch.Tensor]) -> None:
        self._process = process
        self._own = own

    @classmethod
    def capture(cls, loader: object) -> _Origin:
        """Of the process, and those that the loader and its samplers have for themselves."""
        return cls(capture_rng(), [generator.get_state() for generator in _own_generators(loader)])

    def restore(self, loader: object) -> None:
        """Set them all.

        Raises:
            StateMismatch: the loader has other generators than when it was saved.
        """
        generators = _own_generators(loader)
        if len(generators) != len(self._own):
            raise StateMismatch(
                f"the loader had {len(self._own)} torch.Generator of its own when it was saved, now it has "
                f"{len(generators)}: give it the same generator="
            )
        self._process.restore()
        for generator, state in zip(generators, self._own, strict=True):
            generator.set_state(state)

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
            return cls(RngSnapshot.from_state(state["process"]), [decode_bytes(one) for one in state["own"]])
        except (ValueError, KeyError, TypeError) as error:
            raise StateMismatch(f"the saved generators of the loader cannot be read: {error}") from error


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


def closing(loader: object, batches: Iterator[Any]) -> BatchIterator:
    """The iterator of `loader`, with a `close` that ends its workers unless they are persistent."""
    return BatchIterator(batches, keep_workers=bool(getattr(loader, "persistent_workers", False)))


def _of_kind(state: Any, kind: str) -> Mapping[str, Any]:
    saved = state.get("kind") if isinstance(state, Mapping) else None
    if saved == kind:
        found: Mapping[str, Any] = state
        return found
    names = {
        "order": "ResumableDataLoader",
        "stateful": "loader with state_dict",
        "recreated": "plain loader",
    }
    was = names.get(str(saved), repr(saved))
    raise StateMismatch(
        f"the data position of the checkpoint is that of a {was}, this loop has a {names[kind]}. Use the same "
        'kind of loader; or resume_data="epoch" or "fresh" to begin the epoch anew; or start a new run',
        problems=[f"loader: saved {was}, now {names[kind]}"],
    )


def _epoch_to_repeat(state: Any, error: StateMismatch, *, choice: str | None, warn: Warn) -> int:
    """The user chose to go on where the position does not fit: the epoch to begin. Else raise the error."""
    if choice not in {"epoch", "fresh"}:
        raise error
    epoch = _count(state, "epoch")
    problems = "; ".join(error.problems) or str(error)
    warn(
        f'the saved data position does not fit ({problems}): resume_data="{choice}" begins epoch {epoch} anew'
    )
    return epoch


def _count(state: Any, name: str) -> int:
    value = state.get(name, 0) if isinstance(state, Mapping) else 0
    if not is_count(value):
        raise StateMismatch(f"the saved data position cannot be right: {name} is {value!r}")
    return value
