"""The steps of deleting: deciding a manifest's name, withdrawing a checkpoint, deleting the files of one that is gone.

`gc` says in which order they are made. Only files whose names are the format's are ever deleted; whatever else lies
in a checkpoint's folder is somebody's, and is left where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from spotsafe.checkpoint.candidates import Candidate, read_candidate
from spotsafe.checkpoint.layout import CheckpointName, is_file_name
from spotsafe.checkpoint.manifest import ABANDONED, RETIRED, Marker, encode_marker
from spotsafe.checkpoint.references import Needed
from spotsafe.errors import StorageError, StorageUnavailable
from spotsafe.events import DeleteRefused, Event, Warned
from spotsafe.storage.store import Store

Emit = Callable[[Event], object]

__all__ = ["Emit", "decide", "delete_files", "files_in", "is_strange", "withdraw"]


def files_in(name: CheckpointName, paths: Iterable[str]) -> frozenset[str]:
    """Names of the data and index files among the paths of a checkpoint's folder."""
    start = len(name.folder) + 1
    return frozenset(path[start:] for path in paths if is_file_name(path[start:]))


def is_strange(name: CheckpointName, paths: Iterable[str]) -> bool:
    """Whether a folder lies where the manifest would: nobody can publish there, and we did not make it."""
    return any(path.startswith(f"{name.manifest}/") for path in paths)


def decide(store: Store, name: CheckpointName, *, published: bool) -> Candidate:
    """Make sure that the checkpoint is not and will not be published, unless it is.

    Args:
        store: the run.
        name: the checkpoint.
        published: whether a manifest or marker is known to be there; then it is only read.

    Returns:
        What the name is decided to be. With neither manifest nor marker nobody can tell.

    Raises:
        StorageError: it is not known which.
    """
    marker = Marker(state=ABANDONED)
    if not published:
        found = read_candidate(
            store, name
        )  # the listing may be old, and not every store refuses to overwrite
        if not found.absent or found.marker is not None:
            return found
        if store.create(name.manifest, encode_marker(marker)):
            return Candidate(name=name, marker=marker)
    return read_candidate(store, name)


def withdraw(store: Store, name: CheckpointName, *, attempt: int, in_use: Collection[str]) -> Marker | None:
    """End the existence of a published checkpoint, and see that it has ended.

    A manifest of this attempt is deleted, for nobody else can create it, unless the folder has to keep files: then,
    and for another attempt's, whose writer may still live and must not find the name free, a marker replaces it.

    Args:
        store: the run.
        name: the checkpoint.
        attempt: the attempt that deletes.
        in_use: files of the folder that other checkpoints need.

    Returns:
        The marker that is there now, if there is one.

    Raises:
        StorageError: it may still be there; its files must not be touched.
    """
    marker = Marker(state=RETIRED, in_use=tuple(sorted(in_use)))
    if name.attempt == attempt and not in_use:
        store.delete(name.manifest)
    else:
        store.replace(name.manifest, encode_marker(marker))
    after = read_candidate(store, name)
    if after.absent and (after.marker is not None or name.attempt == attempt):
        return after.marker
    raise StorageError(f"{name.manifest} is still there after it was withdrawn", path=name.manifest)


def delete_files(
    store: Store,
    name: CheckpointName,
    *,
    marker: Marker | None,
    needed: Needed,
    attempt: int,
    on_event: Emit,
) -> None:
    """Delete the files of a checkpoint that does not exist (any more), but those that others need.

    The marker says first which files stay, so that at no time it promises one that is gone. An attempt's own marker
    goes with the last file; that of another attempt stays, see `markers`.

    Args:
        store: the run.
        name: the checkpoint, whose name is decided.
        marker: what lies under the manifest's name.
        needed: the files that others need.
        attempt: the attempt that deletes.
        on_event: is told what was refused, and what is not ours.

    Raises:
        StorageUnavailable: the store stopped answering; what is not deleted yet stays as garbage.
    """
    try:
        store.abort_uploads(name.folder)
        paths = [entry.path for entry in store.list(name.folder)]
        present = files_in(name, paths)
        keep = needed.among(name, present)
        if marker is not None and set(marker.in_use) != keep:
            changed = Marker(state=marker.state, in_use=tuple(sorted(keep)))
            store.replace(name.manifest, encode_marker(changed))
    except StorageUnavailable:
        raise
    except StorageError as error:
        on_event(DeleteRefused(path=name.folder, error=str(error)))
        return
    strange = [path for path in paths if path != name.manifest and path.rpartition("/")[2] not in present]
    if strange:
        on_event(Warned(message=f"{', '.join(strange[:3])}: not a file of a checkpoint; left where it is"))
    doomed = [name.file(file) for file in sorted(present - keep)]
    # A list, so that each is tried whatever became of the one before.
    gone = [_delete(store, path, on_event=on_event) for path in doomed]
    if marker is not None and name.attempt == attempt and not keep and all(gone):
        _delete(store, name.manifest, on_event=on_event)


def _delete(store: Store, path: str, *, on_event: Emit) -> bool:
    try:
        store.delete(path)
    except StorageUnavailable:
        raise
    except StorageError as error:
        on_event(DeleteRefused(path=path, error=str(error)))
        return False
    return True
