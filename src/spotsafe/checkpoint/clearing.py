"""What ``spotsafe gc`` does: find what attempts that are over left behind, and delete it by the protocol."""

from __future__ import annotations

from spotsafe.checkpoint import gc
from spotsafe.checkpoint.deleting import Emit
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.markers import EndedAt, remove_markers
from spotsafe.checkpoint.pins import refuses_second_pin
from spotsafe.checkpoint.survey import Survey, survey
from spotsafe.storage.store import Store, creates_exclusively


def find_garbage(store: Store, *, ended_at: EndedAt, now: float) -> Survey:
    """Everything in a run's folder, and what of it is garbage. Changes nothing.

    Where a store does not say whether it refuses a late writer, it is taken to; `delete_garbage` finds out.

    Args:
        store: the run.
        ended_at: when an attempt ended, by its own record; None also if something of it may still arrive.
        now: Unix seconds.

    Raises:
        StorageError: the store could not say.
    """
    exclusive = creates_exclusively(store) is not False
    return survey(store, ended_at=ended_at, now=now, may_delete=may_delete_by(ended_at, exclusive=exclusive))


def delete_garbage(store: Store, found: Survey, *, ended_at: EndedAt, now: float, on_event: Emit) -> None:
    """Delete it by the protocol, which looks again for itself.

    Args:
        store: the run.
        found: by `find_garbage`, without an obstacle.
        ended_at: as there.
        now: as there.
        on_event: is told what the store refused to delete.

    Raises:
        StorageError: the store could not say what is there, or stopped answering.
    """
    may_delete = may_delete_by(ended_at, exclusive=_is_exclusive(store, found, now=now))
    gc.sweep(store, attempt=found.attempt, on_event=on_event, may_delete=may_delete, now=now)
    remove_markers(
        store, attempt=found.attempt, ended_at=ended_at, now=now, on_event=on_event, may_delete=may_delete
    )


def may_delete_by(ended_at: EndedAt, *, exclusive: bool) -> gc.MayDelete:
    """Where a late writer is not refused, only an attempt that recorded its end has none (rule 12)."""
    if exclusive:
        return gc.anything
    ends: dict[int, bool] = {}

    def ended(name: CheckpointName) -> bool:
        if name.attempt not in ends:
            ends[name.attempt] = ended_at(name.attempt) is not None
        return ends[name.attempt]

    return ended


def _is_exclusive(store: Store, found: Survey, *, now: float) -> bool:
    """Whether the store refuses a late writer: what it says, else what it does with an object that is ours alone.

    Not with the name of a manifest: its writer may still live, and what it publishes would be overwritten.
    """
    said = creates_exclusively(store)
    if said is not None:
        return said
    folders = {item.path.split("/")[1] for item in found.items if item.delete}
    name = next(filter(None, map(CheckpointName.parse, sorted(folders))), None)
    return name is not None and refuses_second_pin(store, name, now=now)
