"""What the kinds of feeds share: reading their states, closing iterators; and what is known of foreign loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from spotsafe.data.loader import BatchIterator
from spotsafe.data.order import is_count
from spotsafe.errors import StateMismatch

Warn: TypeAlias = Callable[[str], None]
"""Takes one line for a person."""


def closing(loader: object, batches: Iterator[Any]) -> BatchIterator:
    """The iterator of `loader`, with a `close` that ends its workers unless they are persistent."""
    return BatchIterator(batches, keep_workers=bool(getattr(loader, "persistent_workers", False)))


class ForeignFeed:
    """What holds for every loader that is not ours: its epochs are counted, of its data nothing is known.

    Args:
        loader: the user's loader.
        warn: called with one line for a person.
    """

    def __init__(self, loader: Any, *, warn: Warn) -> None:
        self._loader = loader
        self._warn = warn
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """Epochs finished."""
        return self._epoch

    def place_of(self, state: Any) -> None:  # noqa: ARG002 - the protocol's
        """Not known: two loaders of one kind may have different data."""
        return

    def _iterator(self) -> BatchIterator:
        return closing(self._loader, iter(self._loader))


def state_of_kind(state: Any, kind: str) -> Mapping[str, Any]:
    """The state, if a feed of this kind made it.

    Raises:
        StateMismatch: another kind did.
    """
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
        f"the data position of the checkpoint is that of a {was}, this loop has a {names[kind]}. Use the "
        'same kind of loader; or resume_data="epoch" or "fresh" to begin the epoch anew; or start a new run',
        problems=[f"loader: saved {was}, now {names[kind]}"],
    )


def epoch_to_repeat(state: Any, error: StateMismatch, *, choice: str | None, warn: Warn) -> int:
    """The epoch to begin, if the user chose to go on where the position does not fit; else raise `error`."""
    if choice not in {"epoch", "fresh"}:
        raise error
    epoch = count_in(state, "epoch")
    problems = "; ".join(error.problems) or str(error)
    warn(
        f'the saved data position does not fit ({problems}): resume_data="{choice}" begins epoch {epoch} anew'
    )
    return epoch


def count_in(state: Any, name: str) -> int:
    """The whole number of that name; 0 if there is none.

    Raises:
        StateMismatch: it is no count.
    """
    value = state.get(name, 0) if isinstance(state, Mapping) else 0
    if not is_count(value):
        raise StateMismatch(f"the saved data position cannot be right: {name} is {value!r}")
    return value
