"""Deleting: retention of published checkpoints, and the remains of saves that were never published.

A checkpoint is withdrawn before its files are touched, and each withdrawal is confirmed by reading it back:
there is no instant at which a published checkpoint lacks a file. What any published manifest refers to stays.
What the store refuses to delete stays as garbage and is reported; it never makes a save fail.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spotsafe.checkpoint.branch import Branch, is_set_aside
from spotsafe.checkpoint.candidates import missing_from
from spotsafe.checkpoint.cleaning import Cleaning, Known, MayDelete
from spotsafe.checkpoint.deleting import Emit, decide, delete_files
from spotsafe.checkpoint.layout import (
    CHECKPOINTS,
    LEDGER,
    CheckpointName,
    is_frozen_file,
    ledger_folder,
    parse_ledger_folder,
)
from spotsafe.checkpoint.manifest import Manifest
from spotsafe.checkpoint.pins import ROLLBACK, remove_pins
from spotsafe.checkpoint.references import Needed
from spotsafe.errors import StorageError, StorageUnavailable
from spotsafe.events import DeleteRefused
from spotsafe.policy.retention import FLOOR, Keep, Saved, victims
from spotsafe.storage.store import Store


def anything(_name: CheckpointName) -> bool:
    """On a store with create-if-absent every checkpoint of an older attempt may be deleted."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What decides which checkpoints stay."""

    keep: Keep
    resumed_from: str | None
    passed_over: frozenset[str] = frozenset()
    rollbacks: Branch = ()
    """What they set aside is neither counted nor touched."""


def apply_retention(
    store: Store,
    *,
    attempt: int,
    retention: Retention,
    on_event: Emit,
    known: Known | None = None,
    may_delete: MayDelete = anything,
    now: float = 0.0,
) -> list[CheckpointName]:
    """Withdraw what the policy does not keep (rule 7). Call it only right after a publish that `may_delete`.

    All manifests first, each confirmed; then the files of those confirmed. A manifest that is damaged, also at a
    second read, is neither counted nor touched. One of an unknown version keeps everything where it is.

    Args:
        store: the run.
        attempt: the attempt that cleans up, which is the newest, and has swept.
        retention: the policy.
        on_event: is told what was deleted, refused, or left alone and why.
        known: manifests that were read before. They never change but for those that this attempt withdraws,
            so each is read once; updated in place. What it knows to be published counts, also if a listing that
            is old does not show it.
        may_delete: on a store without create-if-absent, which checkpoints have no other writer (rule 12).
        now: Unix seconds, for readers' pins; by default none of them is over.

    Returns:
        What was withdrawn.

    Raises:
        StorageError: the store could not say what is there (nothing was deleted), or stopped answering.
    """
    one = Cleaning(
        store=store,
        attempt=attempt,
        on_event=on_event,
        known={} if known is None else known,
        may_delete=may_delete,
        now=now,
    )
    if not one.look():
        return []
    torn = {str(name) for name, manifest in one.published.items() if missing_from(manifest, one.folders)}
    aside = {str(name) for name in one.published if is_set_aside(name, retention.rollbacks)}
    chosen = victims(
        [_saved(manifest) for manifest in one.published.values()],
        keep=retention.keep,
        resumed_from=retention.resumed_from,
        passed_over=retention.passed_over | torn | aside,  # not counted, not touched: the listing may be old
    )
    withdrawn = {saved.name for saved in chosen}
    _let_go(one, retention.rollbacks)
    gone = one.retire(sorted(name for name in one.published if str(name) in withdrawn))
    one.trim(is_frozen_file, below=attempt + 1)
    return gone


def sweep(
    store: Store,
    *,
    attempt: int,
    on_event: Emit,
    known: Known | None = None,
    may_delete: MayDelete = anything,
    now: float = 0.0,
) -> list[CheckpointName]:
    """Delete what older attempts left behind and never published (rule 5).

    The name of the manifest is decided first: if the marker cannot be created there, the checkpoint was
    published after all and stays. Then the run is looked at again: only when all names are decided, and it is known
    what those that exist refer to, files are deleted; also those that a withdrawn checkpoint still has and nobody
    needs.

    Args:
        store: the run.
        attempt: the attempt that cleans up, which has published; only lower ones are touched.
        on_event: is told what the store refused to delete, and what lies there that is not ours.
        known: as for `apply_retention`.
        may_delete: as for `apply_retention`.
        now: as for `apply_retention`.

    Returns:
        The checkpoints whose remains were deleted.

    Raises:
        StorageError: the store could not say what is there, or stopped answering.
    """
    one = Cleaning(
        store=store,
        attempt=attempt,
        on_event=on_event,
        known={} if known is None else known,
        may_delete=may_delete,
        now=now,
    )
    swept = []
    if one.look(strangers=True) and (not one.decide_all() or one.look()):
        swept = one.trim(lambda _file: True, below=attempt)
    _abort_uploads(store, attempt=attempt, on_event=on_event, may_delete=may_delete)
    return swept


def discard(store: Store, name: CheckpointName, *, manifest_tried: bool, on_event: Emit) -> bool:
    """Delete the files of a failed save of this very attempt, whose number is never used again.

    Nobody refers to them: only files of a checkpoint that was published are referred to.

    Args:
        store: the run.
        name: the save.
        manifest_tried: whether creating the manifest was begun. Then it may be there, or arrive late, so the
            name is decided by a marker first.
        on_event: is told what the store refused to delete.

    Returns:
        False if the checkpoint turns out to be published; it stays.

    Raises:
        StorageError: the name could not be decided, or the store stopped answering.
    """
    if manifest_tried and decide(store, name, published=False).marker is None:
        return False
    delete_files(store, name, marker=None, needed=Needed(), attempt=name.attempt, on_event=on_event)
    return True


def _let_go(one: Cleaning, rollbacks: Branch) -> None:
    """A checkpoint that was gone back to needs no pin any more once two newer healthy ones are there."""
    for rollback in rollbacks:
        newer = [
            name
            for name, manifest in one.published.items()
            if name > rollback.name and manifest.health.healthy and not is_set_aside(name, rollbacks)
        ]
        if len(newer) >= FLOOR:
            remove_pins(one.store, rollback.name, purpose=ROLLBACK)


def _saved(manifest: Manifest) -> Saved:
    return Saved(
        name=str(manifest.name),
        order=(manifest.attempt, manifest.step, manifest.save),
        step=manifest.step,
        created=manifest.created,
        healthy=manifest.health.healthy,
        metrics=manifest.metrics,
    )


def _abort_uploads(store: Store, *, attempt: int, on_event: Emit, may_delete: MayDelete) -> None:
    """Of a save that was killed inside its first file nothing is listed, but that file may be a large one.

    No name has to be decided: a writer that lives on and loses the file it is writing fails, and may try again.
    A heartbeat that was killed leaves half a file too; an attempt that lives loses one of them at most.
    """
    for folder in _folders(store.begun(CHECKPOINTS)):
        name = CheckpointName.parse(folder)
        if name is not None and name.attempt < attempt and may_delete(name):
            _abort_below(store, name.folder, on_event=on_event)
    for folder in _folders(store.begun(LEDGER)):
        number = parse_ledger_folder(folder)
        if number is not None and number < attempt:
            _abort_below(store, ledger_folder(number), on_event=on_event)


def _folders(paths: Iterable[str]) -> list[str]:
    return sorted({path.split("/")[1] for path in paths if path.count("/") > 1})


def _abort_below(store: Store, folder: str, *, on_event: Emit) -> None:
    try:
        store.abort_uploads(folder)
    except StorageUnavailable:
        raise
    except StorageError as error:
        on_event(DeleteRefused(path=folder, error=str(error)))


__all__ = ["MayDelete", "Retention", "anything", "apply_retention", "discard", "sweep"]
