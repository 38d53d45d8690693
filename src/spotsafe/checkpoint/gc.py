"""Deleting: retention of published checkpoints, and the remains of saves that were never published.

A checkpoint is withdrawn before its files are touched, and each withdrawal is confirmed by reading it back:
there is no instant at which a published checkpoint lacks a file. What the store refuses to delete stays as
garbage and is reported; it never makes a save fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass

from spotsafe.checkpoint.branch import Branch, is_set_aside
from spotsafe.checkpoint.candidates import Candidate, by_folder, missing_from, read_candidate
from spotsafe.checkpoint.layout import CHECKPOINTS, LEDGER, CheckpointName, ledger_folder, parse_ledger_folder
from spotsafe.checkpoint.manifest import Manifest, Marker, encode_marker
from spotsafe.checkpoint.pins import pinned
from spotsafe.errors import StorageError, StorageUnavailable
from spotsafe.events import CheckpointRetired, DeleteRefused, Event, Warned
from spotsafe.policy.retention import Keep, Saved, victims
from spotsafe.storage.store import Store

Emit = Callable[[Event], object]

MayDelete = Callable[[CheckpointName], bool]

ABANDONED = "abandoned"
RETIRED = "retired"


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
    known: MutableMapping[CheckpointName, Candidate] | None = None,
    may_delete: MayDelete = anything,
    now: float = 0.0,
) -> list[CheckpointName]:
    """Withdraw what the policy does not keep (rule 7). Call it only right after a publish that `may_delete`.

    Args:
        store: the run.
        attempt: the attempt that cleans up, which is the newest.
        retention: the policy.
        on_event: is told what was deleted, refused, or left alone and why.
        known: manifests that were read before. They never change but for those that this attempt withdraws,
            so each is read once; updated in place.
        may_delete: on a store without create-if-absent, which checkpoints have no other writer (rule 12).
        now: Unix seconds, for readers' pins; by default none of them is over.

    Returns:
        What was withdrawn.

    Raises:
        StorageError: the store could not say what is there (nothing was deleted), or stopped answering.
    """
    folders = by_folder(store.list(CHECKPOINTS))
    found = _read_published(store, folders, {} if known is None else known)
    obstacle = _obstacle(found, attempt=attempt)
    if obstacle:
        on_event(Warned(message=f"nothing is deleted: {obstacle}"))
        return []
    manifests = [candidate.manifest for candidate in found if candidate.manifest is not None]
    torn = {str(manifest.name) for manifest in manifests if missing_from(manifest, folders[manifest.name])}
    aside = {str(manifest.name) for manifest in manifests if is_set_aside(manifest.name, retention.rollbacks)}
    chosen = victims(
        [_saved(manifest) for manifest in manifests],
        keep=retention.keep,
        resumed_from=retention.resumed_from,
        passed_over=retention.passed_over | torn | aside,  # not counted, not touched: the listing may be old
    )
    withdrawn = {one.name for one in chosen}
    names = sorted(manifest.name for manifest in manifests if str(manifest.name) in withdrawn)
    names = list(filter(may_delete, names))
    return retire(store, names, attempt=attempt, on_event=on_event, known=known, now=now)


def retire(
    store: Store,
    names: Iterable[CheckpointName],
    *,
    attempt: int,
    on_event: Emit,
    known: MutableMapping[CheckpointName, Candidate] | None = None,
    now: float = 0.0,
) -> list[CheckpointName]:
    """Withdraw published checkpoints: all manifests first, each confirmed; then the files of those confirmed.

    What a reader has pinned is left alone: looked for before the first manifest, and again before the first file.

    A manifest of this attempt is deleted, for nobody else can create it. That of another attempt is
    overwritten with a marker: its writer may still live, and must not find the name free.

    Returns:
        Those that were withdrawn.

    Raises:
        StorageUnavailable: the store stopped answering; what is not deleted yet stays as garbage.
    """
    gone = []
    chosen = list(names)
    kept = pinned(store, chosen, now=now)
    for name in chosen:
        if name in kept:
            continue
        try:
            if known is not None:
                known.pop(name, None)
            _withdraw(store, name, attempt=attempt)
        except StorageUnavailable:
            raise
        except StorageError as error:
            on_event(DeleteRefused(path=name.manifest, error=str(error)))
        else:
            gone.append(name)
    kept = pinned(store, gone, now=now)
    for name in gone:
        if name not in kept:
            _delete_files(store, name, on_event=on_event)
        on_event(CheckpointRetired(checkpoint=str(name)))
    return gone


def sweep(
    store: Store, *, attempt: int, on_event: Emit, may_delete: MayDelete = anything, now: float = 0.0
) -> list[CheckpointName]:
    """Delete what older attempts left behind and never published (rule 5).

    The name of the manifest is decided first: if the marker cannot be created there, the checkpoint was
    published after all and stays. Files that a withdrawn checkpoint still has are deleted too.

    Args:
        store: the run.
        attempt: the attempt that cleans up, which has published; only lower ones are touched.
        on_event: is told what the store refused to delete.
        may_delete: as for `apply_retention`.
        now: as for `apply_retention`.

    Returns:
        The checkpoints whose remains were deleted.

    Raises:
        StorageError: the store could not say what is there, or stopped answering.
    """
    swept = []
    folders = by_folder(store.list(CHECKPOINTS))
    remains = [
        name
        for name, sizes in sorted(folders.items())
        if name.attempt < attempt and set(sizes) != {name.manifest} and may_delete(name)
    ]
    # A withdrawn checkpoint can be pinned, but no longer be newly pinned: one look is enough.
    kept = pinned(store, remains, now=now)
    for name in remains:
        sizes = folders[name]
        if name in kept:
            continue
        marker = _decide(store, name, published=name.manifest in sizes)
        if marker is None:
            continue
        _delete_files(store, name, on_event=on_event, keep=frozenset(map(name.file, marker.in_use)))
        swept.append(name)
    _abort_uploads(store, attempt=attempt, on_event=on_event, may_delete=may_delete)
    return swept


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


def discard(store: Store, name: CheckpointName, *, manifest_tried: bool, on_event: Emit) -> bool:
    """Delete the files of a failed save of this very attempt, whose number is never used again.

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
    if manifest_tried and _decide(store, name, published=False) is None:
        return False
    _delete_files(store, name, on_event=on_event)
    return True


def _read_published(
    store: Store,
    folders: dict[CheckpointName, dict[str, int]],
    known: MutableMapping[CheckpointName, Candidate],
) -> list[Candidate]:
    listed = [name for name, sizes in folders.items() if name.manifest in sizes]
    for name in listed:
        if name not in known:
            known[name] = read_candidate(store, name)  # one after the other: this runs behind training
    found = [known[name] for name in listed]
    for candidate in found:
        if candidate.manifest is None and candidate.marker is None:
            del known[candidate.name]  # only these two are final
    return found


def _obstacle(found: Iterable[Candidate], *, attempt: int) -> str:
    for candidate in found:
        if candidate.fault is not None:
            return str(candidate.fault)
        if candidate.name.attempt > attempt:
            return f"{candidate.name} is of a newer attempt"
    return ""


def _saved(manifest: Manifest) -> Saved:
    return Saved(
        name=str(manifest.name),
        order=(manifest.attempt, manifest.step, manifest.save),
        step=manifest.step,
        created=manifest.created,
        healthy=manifest.health.healthy,
        metrics=manifest.metrics,
    )


def _withdraw(store: Store, name: CheckpointName, *, attempt: int) -> None:
    if name.attempt == attempt:
        store.delete(name.manifest)
    else:
        store.replace(name.manifest, encode_marker(Marker(state=RETIRED)))
    after = read_candidate(store, name)
    withdrawn = after.absent if name.attempt == attempt else after.marker is not None
    if not withdrawn:
        raise StorageError(f"{name.manifest} is still there after it was withdrawn", path=name.manifest)


def _decide(store: Store, name: CheckpointName, *, published: bool) -> Marker | None:
    """Make sure that the checkpoint is not and will not be published; None if it is, or nobody can tell."""
    marker = Marker(state=ABANDONED)
    if not published and store.create(name.manifest, encode_marker(marker)):
        return marker
    return read_candidate(store, name).marker


def _delete_files(
    store: Store, name: CheckpointName, *, on_event: Emit, keep: frozenset[str] = frozenset()
) -> None:
    try:
        store.abort_uploads(name.folder)
        paths = [entry.path for entry in store.list(name.folder)]
    except StorageUnavailable:
        raise
    except StorageError as error:
        on_event(DeleteRefused(path=name.folder, error=str(error)))
        return
    for path in paths:
        if path == name.manifest or path in keep:
            continue
        try:
            store.delete(path)
        except StorageUnavailable:
            raise
        except StorageError as error:
            on_event(DeleteRefused(path=path, error=str(error)))
