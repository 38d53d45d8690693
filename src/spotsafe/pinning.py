"""`spotsafe.pin`: a reader keeps a checkpoint from being deleted while it reads it."""

from __future__ import annotations

import logging
import math
import os
import time
from types import TracebackType

from spotsafe.checkpoint import pins
from spotsafe.checkpoint.catalog import resolve, split_target
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.pins import Pin
from spotsafe.errors import CheckpointNotFound, StorageError
from spotsafe.identity import Identity
from spotsafe.storage.open import open_store
from spotsafe.storage.store import Store

_TRIES = 10

_log = logging.getLogger(__name__)


class Pinned:
    """A checkpoint that stays until `release`, the end of the ``with`` block, or its time. Made by `pin`.

    Attributes:
        url: the checkpoint's url, with its full name behind the ``@``: what to give to `spotsafe.load`.
        name: the checkpoint's full name.
        step: its step.
        until: when the pin ends by itself, in Unix seconds.
    """

    def __init__(self, store: Store, placed: Pin, *, name: CheckpointName) -> None:
        self.url = f"{store.url}@{name}"
        self.name = str(name)
        self.step = name.step
        self.until = placed.until
        self._store = store
        self._placed = placed

    def release(self) -> None:
        """Let the checkpoint go. A second call does nothing.

        Raises:
            StorageError: the store refused; the pin ends at its time.
        """
        self._store.delete(self._placed.path)

    def __enter__(self) -> Pinned:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except StorageError as refused:  # what the block did counts, and the pin ends by itself
            _log.warning("the pin of %s stays until its time: %s", self.url, refused)


def pin(url: str | os.PathLike[str] | Store, *, hours: float = 24.0) -> Pinned:
    """Keep a checkpoint from being deleted while it is read, by an evaluation job for example.

    ::

        with spotsafe.pin("s3://bucket/run-0412") as pinned:
            state = spotsafe.load(pinned.url)

    The training job goes on; its retention leaves the checkpoint alone. Nothing else in the run is changed.

    Args:
        url: the run, with ``@latest`` (the default), ``@best``, ``@<step>`` or ``@<a checkpoint's name>`` behind it.
        hours: after which the pin ends by itself, for a reader that is killed cannot release it.

    Raises:
        CheckpointNotFound: there is no such checkpoint, or it was being deleted at this moment.
        DamagedCheckpoint: its manifest cannot be read.
        UnsupportedFormat: a newer spotsafe wrote it.
        StorageError: the store could not say, or refused to be written to.
        ValueError: `hours` is not above 0.
    """
    if isinstance(hours, bool) or not (math.isfinite(hours) and hours > 0):
        raise ValueError(f"pin(hours=) must be more than 0, got {hours!r}")
    base, selector = (url, None) if isinstance(url, Store) else split_target(os.fspath(url))
    until = time.time() + hours * 3600
    return place(open_store(base), selector, until=until, identity=Identity.of_this_process())


def place(store: Store, selector: str | int | None, *, until: float, identity: Identity) -> Pinned:
    """What `pin` does, with the time of its end (Unix seconds) and who keeps it given.

    Raises:
        As `pin`.
    """
    for _ in range(_TRIES):
        name = resolve(store, selector).name
        try:
            placed = pins.place_pin(store, name, until=until, identity=identity)
        except CheckpointNotFound:
            if selector not in {None, "latest"}:
                raise
        else:
            return Pinned(store, placed, name=name)
    raise CheckpointNotFound(
        f"{store.url}: the latest checkpoint was deleted {_TRIES} times while it was pinned"
    )


def unpin(url: str | os.PathLike[str] | Store) -> int:
    """Delete every pin of a checkpoint, whoever placed it; without a selector, every pin of the run.

    Returns:
        How many there were.

    Raises:
        CheckpointNotFound: there is no such checkpoint.
        StorageError: the store could not say, or refused.
    """
    base, selector = (url, None) if isinstance(url, Store) else split_target(os.fspath(url))
    store = open_store(base)
    if selector is None:
        names = {name for name, _ in pins.read_pins(store)}
    else:
        named = CheckpointName.parse(selector) if isinstance(selector, str) else None
        names = {named or resolve(store, selector).name}
    return sum(pins.remove_pins(store, name) for name in sorted(names))
