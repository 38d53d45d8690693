"""Markers: when the last trace of a checkpoint that is gone may go too.

A marker keeps the name of a manifest from a writer that may still live (rule 5). It may go when no such writer can
be left: when its attempt recorded its end long enough ago for every request to have arrived, or when the attempt
after it started a week ago. A writer creates a manifest right after it has looked whether that attempt exists; it
would have had to stand still between these two requests for all that time. If one ever did, its checkpoint would
lack its files, and be passed over by everybody.
"""

from __future__ import annotations

from collections.abc import Callable

from spotsafe.checkpoint.attempts import read_attempt
from spotsafe.checkpoint.candidates import by_folder, read_candidate
from spotsafe.checkpoint.cleaning import Known, MayDelete
from spotsafe.checkpoint.deleting import Emit
from spotsafe.checkpoint.layout import CHECKPOINTS, CheckpointName
from spotsafe.errors import DamagedCheckpoint, StorageError, StorageNotFound, StorageUnavailable
from spotsafe.events import DeleteRefused
from spotsafe.storage.store import Store

HOUR_S = 3600.0
"""Seconds after an attempt's end in which a request of it may still arrive; clocks may differ by some of it."""
WEEK_S = 7 * 86_400.0

EndedAt = Callable[[int], "float | None"]
"""When an attempt ended, in Unix seconds, by its own record; None if it has none."""


def is_over(store: Store, attempt: int, *, ended_at: EndedAt, now: float) -> bool:
    """Whether no writer of an attempt can live.

    Args:
        store: the run.
        attempt: which.
        ended_at: what is recorded.
        now: Unix seconds.

    Raises:
        StorageError: the store could not say.
    """
    ended = ended_at(attempt)
    if ended is not None:
        return now - ended > HOUR_S
    try:
        return now - read_attempt(store, attempt + 1).started > WEEK_S
    except (StorageNotFound, DamagedCheckpoint):
        return False


def remove_markers(
    store: Store,
    *,
    attempt: int,
    ended_at: EndedAt,
    now: float,
    on_event: Emit,
    known: Known | None = None,
    may_delete: MayDelete = lambda _: True,
) -> list[CheckpointName]:
    """Delete the markers that are alone in their folders and guard against nobody any more.

    Args:
        store: the run.
        attempt: the newest attempt; only markers of lower ones go.
        ended_at: see `is_over`.
        now: see `is_over`.
        on_event: is told what the store refused to delete.
        known: what was read before; updated in place.
        may_delete: as for `gc.apply_retention`.

    Returns:
        Whose markers were deleted.

    Raises:
        StorageError: the store could not say, or stopped answering.
    """
    folders = by_folder(store.list(CHECKPOINTS))
    alone = [name for name, sizes in sorted(folders.items()) if set(sizes) == {name.manifest}]
    over: dict[int, bool] = {}
    gone = []
    for name in alone:
        if name.attempt >= attempt or not may_delete(name):
            continue
        candidate = (known or {}).get(name) or read_candidate(store, name)
        if candidate.marker is None:
            continue
        if name.attempt not in over:
            over[name.attempt] = is_over(store, name.attempt, ended_at=ended_at, now=now)
        if over[name.attempt]:
            try:
                store.delete(name.manifest)
            except StorageUnavailable:
                raise
            except StorageError as error:
                on_event(DeleteRefused(path=name.manifest, error=str(error)))
            else:
                gone.append(name)
                if known is not None:
                    known.pop(name, None)
    return gone
