"""The first values of a fresh run from another run: `init_from`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spotsafe.checkpoint.candidates import Candidate
from spotsafe.checkpoint.catalog import resolve, split_target
from spotsafe.clock import Clock
from spotsafe.errors import CheckpointNotFound, StateMismatch
from spotsafe.events import Event
from spotsafe.options import InitFrom
from spotsafe.reader import load_verified, read_description
from spotsafe.storage.open import open_store
from spotsafe.storage.store import Store
from spotsafe.tracking import Tracker


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialized:
    """What a fresh run began with."""

    checkpoint: str
    """Url and full name: ``runs/a@a000001-...``."""
    names: tuple[str, ...]
    """The tracked objects that got values."""


def check_initial_values(source: InitFrom, *, tracker: Tracker) -> None:
    """Refuse a source that is not there or does not fit, before anything is claimed. No tensor is read.

    Raises:
        CheckpointNotFound: that run has no such checkpoint.
        StateMismatch: what is there does not fit.
        DamagedCheckpoint: its index is not what was published.
        StorageError: it could not be read.
    """
    store, candidate = _find(source)
    description = read_description(store, candidate)
    _, problems = tracker.check_initial(
        tensors=description.tensors, state=description.state, weights_only=source.what == "weights"
    )
    if problems:
        lines = "\n  ".join(problems)
        raise StateMismatch(
            f"init_from={source.url!r}: checkpoint {candidate.name} does not fit the program:\n  {lines}\n"
            "Nothing was started. Name another checkpoint, or track under the names that `spotsafe show` prints",
            problems=problems,
        )


def load_initial_values(
    source: InitFrom, *, tracker: Tracker, emit: Callable[[Event], None], clock: Clock
) -> Initialized:
    """Give the tracked objects their first values.

    Raises:
        CheckpointNotFound: that run has no such checkpoint.
        StateMismatch: what is there does not fit.
        DamagedCheckpoint: bytes differ from what was published.
        StorageError: it could not be read.
    """
    store, candidate = _find(source)
    loaded = load_verified(store, candidate, emit=emit, clock=clock)
    names = tracker.initialize(loaded.saved, weights_only=source.what == "weights")
    return Initialized(checkpoint=f"{store.url}@{candidate.name}", names=tuple(names))


def _find(source: InitFrom) -> tuple[Store, Candidate]:
    try:
        url, selector = split_target(source.url)
        store = open_store(url)
        return store, resolve(store, selector or "latest")
    except CheckpointNotFound as error:
        raise CheckpointNotFound(f"init_from={source.url!r}: {error}") from error
