"""Looking at a run: which attempts and checkpoints are there, and what their manifests say.

A storage error always propagates: "could not look" is never "there is none". The order is that of
`CheckpointName`, by integers; never names as text, times of files, or a pointer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from spotsafe.checkpoint import manifest as manifest_format
from spotsafe.checkpoint.branch import Branch, gone_back_to, on_branch
from spotsafe.checkpoint.layout import (
    ATTEMPTS,
    CHECKPOINTS,
    MANIFEST,
    CheckpointName,
    is_data_file,
    parse_attempt,
    parse_published,
)
from spotsafe.checkpoint.manifest import Manifest, Marker, Part
from spotsafe.checkpoint.pins import pinned_manifest
from spotsafe.checkpoint.room import room_for
from spotsafe.errors import (
    DamagedCheckpoint,
    SpotsafeError,
    StorageError,
    StorageNotFound,
    UnsupportedFormat,
)
from spotsafe.storage.store import Entry, Store

if TYPE_CHECKING:
    from spotsafe.checkpoint.index import Index

Decoded: TypeAlias = "dict[tuple[str, bool], Index]"
"""What bytes of an index mean, by their SHA-256 and whether they must be complete: for who reads one twice."""
_READERS = 8
"""Manifests read at the same time; a remote store answers each in some tens of milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a look at the run's folder showed. Names that are not ours are left out."""

    attempts: tuple[int, ...]
    """Claimed attempts, lowest first."""
    published: frozenset[int]
    """Attempts that have published at least once."""
    names: tuple[CheckpointName, ...]
    """Folders of checkpoints, published or not, newest first."""

    @property
    def highest(self) -> int:
        """The highest attempt that left any trace; 0 for an empty folder."""
        return max((*self.attempts, *self.published, *(name.attempt for name in self.names)), default=0)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Attempts whose records may be there, newest first.

        Attempts are listed before checkpoints, so one may be claimed in between and show by its checkpoint alone.
        """
        return tuple(sorted({*self.attempts, self.highest} - {0}, reverse=True))

    def on(self, branch: Branch) -> Listing:
        """The same without the checkpoints that rollbacks set aside: what a start chooses from."""
        return replace(self, names=on_branch(self.names, branch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint's folder and what its manifest says. Without a manifest it cannot be used."""

    name: CheckpointName
    manifest: Manifest | None = None
    marker: Marker | None = None
    """Set if the checkpoint was abandoned or retired: it is not there."""
    fault: SpotsafeError | None = None
    """`DamagedCheckpoint`: it is no manifest. `UnsupportedFormat`: it stops a start, no walk-back."""

    @property
    def absent(self) -> bool:
        """Whether the checkpoint does not exist: never published, abandoned or retired."""
        return self.manifest is None and self.fault is None

    @property
    def reason(self) -> str:
        """Why it cannot be used; empty if it can, as far as the manifest tells."""
        if self.manifest is not None:
            return ""
        if self.fault is not None:
            return str(self.fault)
        return self.marker.state if self.marker is not None else "never published"


def look(store: Store) -> Listing:
    """List attempts and checkpoints.

    Attempts come first: an attempt marks that it has published after its manifest is there, so whoever sees
    the mark also sees the checkpoint.

    Raises:
        StorageError: the store could not say.
    """
    marks = store.names(ATTEMPTS)
    return listing_of(marks, store.names(CHECKPOINTS))


def listing_of(marks: Iterable[str], folders: Iterable[str]) -> Listing:
    """What the base names in the folders of attempts and of checkpoints say."""
    marks = list(marks)
    return Listing(
        attempts=tuple(sorted(number for mark in marks if (number := parse_attempt(mark)) is not None)),
        published=frozenset(number for mark in marks if (number := parse_published(mark)) is not None),
        names=_newest_first(folders),
    )


def read_candidate(store: Store, name: CheckpointName) -> Candidate:
    """Read one manifest by its key. Damage is believed after a second read.

    Raises:
        StorageError: it could not be read.
    """
    try:
        return _read_once(store, name)
    except DamagedCheckpoint:
        pass
    except UnsupportedFormat as error:
        return Candidate(name=name, fault=error)
    try:
        return _read_once(store, name)
    except (DamagedCheckpoint, UnsupportedFormat) as error:
        return Candidate(name=name, fault=error)


def candidates(store: Store, listing: Listing, branch: Branch = ()) -> Iterator[Candidate]:
    """What exists or should exist, newest first, each read when it is asked for; absent ones are left out.

    Args:
        store: the run.
        listing: a look at it.
        branch: the rollbacks that count: what they set aside is left out. The checkpoint that was gone back to is
            there even if an attempt that lived then has withdrawn it: its pin has the manifest, and keeps the files.

    Raises:
        StorageError: one could not be read.
    """
    for name in listing.on(branch).names:
        candidate = with_its_pin(store, read_candidate(store, name), branch)
        if not candidate.absent:
            yield candidate


def with_its_pin(store: Store, candidate: Candidate, branch: Branch) -> Candidate:
    """The candidate, with the manifest of its pin if it is the one that was gone back to and has been withdrawn.

    Raises:
        StorageError: the pins could not be read.
    """
    if not candidate.absent or str(candidate.name) != gone_back_to(branch):
        return candidate
    manifest = pinned_manifest(store, candidate.name)
    return candidate if manifest is None else Candidate(name=candidate.name, manifest=manifest)


def read_many(store: Store, names: Iterable[CheckpointName]) -> list[Candidate]:
    """Read several manifests, some at the same time; in the order of `names`.

    For commands that a person waits for. The interpreter joins these threads at exit, so that a store that hangs
    would keep a process from leaving: a session reads one after the other.

    Raises:
        StorageError: one could not be read.
    """
    wanted = list(names)
    if len(wanted) < 2:
        return [read_candidate(store, name) for name in wanted]
    with ThreadPoolExecutor(
        max_workers=min(_READERS, len(wanted)), thread_name_prefix="spotsafe-read"
    ) as pool:
        return list(pool.map(lambda name: read_candidate(store, name), wanted))


def read_index(store: Store, candidate: Candidate, part: Part, *, decoded: Decoded | None = None) -> Index:
    """One rank's index, compared with the manifest. Damage is believed after a second read.

    Args:
        store: the run.
        candidate: the checkpoint.
        part: the rank's, from its manifest.
        decoded: what was decoded before, and what is decoded now. The file is read and compared all the same.

    Raises:
        StorageError: it could not be read; `StorageNotFound` if it is gone.
        DamagedCheckpoint: it is not what was published.
        UnsupportedFormat: a newer spotsafe wrote it.
        NotEnoughMemory: it does not fit into memory.
    """
    with room_for(f"{candidate.name}/{part.file}"):
        try:
            return _read_index_once(store, candidate, part, decoded)
        except DamagedCheckpoint:
            return _read_index_once(store, candidate, part, decoded)


def missing_from(manifest: Manifest, folders: Mapping[CheckpointName, Mapping[str, int]]) -> str:
    """What a listing alone shows to be missing from a published checkpoint; empty if it looks whole.

    Args:
        manifest: the checkpoint.
        folders: the whole listing, as `by_folder` gives it: size in bytes of each object, by path.
    """
    sizes = folders.get(manifest.name, {})
    for part in manifest.parts:
        size = sizes.get(manifest.name.file(part.file))
        if size is None:
            return f"{part.file} is missing"
        if size != part.size:
            return f"{part.file} has {size} bytes, not {part.size}"
    found = sum(size for path, size in sizes.items() if is_data_file(path.rpartition("/")[2]))
    if found < manifest.total_bytes:
        return f"its data files have {found} bytes, not {manifest.total_bytes}"
    for one in manifest.references:
        size = folders.get(one.owner, {}).get(one.path)
        if size is None:
            return f"{one.file} of {one.checkpoint}, which it refers to, is missing"
        if size != one.size:
            return f"{one.file} of {one.checkpoint}, which it refers to, has {size} bytes, not {one.size}"
    return ""


def by_folder(entries: Iterable[Entry]) -> dict[CheckpointName, dict[str, int]]:
    """Sizes by path, grouped by checkpoint; what lies in no checkpoint's folder is left out."""
    folders: dict[CheckpointName, dict[str, int]] = {}
    for entry in entries:
        top, _, rest = entry.path.partition("/")
        folder, inside, _ = rest.partition("/")
        name = CheckpointName.parse(folder)
        if top == CHECKPOINTS and inside and name is not None:
            folders.setdefault(name, {})[entry.path] = entry.size
    return folders


def _newest_first(folders: Iterable[str]) -> tuple[CheckpointName, ...]:
    names = (CheckpointName.parse(folder) for folder in folders)
    return tuple(sorted((name for name in names if name is not None), reverse=True))


def _read_once(store: Store, name: CheckpointName) -> Candidate:
    try:
        data = _read_whole(store, name, MANIFEST, limit=manifest_format.MAX_BYTES)
    except StorageNotFound:
        return Candidate(name=name)
    decoded = manifest_format.decode(data, expected=name)
    if isinstance(decoded, Marker):
        return Candidate(name=name, marker=decoded)
    return Candidate(name=name, manifest=decoded)


def _read_index_once(store: Store, candidate: Candidate, part: Part, decoded: Decoded | None) -> Index:
    # It brings numpy, a tenth of a second that a mere listing should not pay.
    from spotsafe.checkpoint.index import MAX_BYTES, decode_index  # noqa: PLC0415 - listing runs needs no index

    name = candidate.name
    if part.size > MAX_BYTES:
        reason = f"its manifest says {part.size} bytes, more than the {MAX_BYTES} it may have"
        raise DamagedCheckpoint(checkpoint=str(name), file=part.file, reason=reason)
    data = _read_whole(store, name, part.file, limit=part.size)
    if len(data) != part.size:
        reason = f"has {len(data)} bytes, not {part.size}"
        raise DamagedCheckpoint(checkpoint=str(name), file=part.file, reason=reason)
    if hashlib.sha256(data).hexdigest() != part.sha256:
        raise DamagedCheckpoint(
            checkpoint=str(name), file=part.file, reason="its SHA-256 is not the published one"
        )
    alone = candidate.manifest is None or len(candidate.manifest.parts) == 1
    index = None if decoded is None else decoded.get((part.sha256, alone))
    if index is None:
        index = decode_index(data, checkpoint=str(name), file=part.file, complete=alone)
        if decoded is not None:
            decoded[part.sha256, alone] = index
    if candidate.manifest is not None:
        known = {(one.checkpoint, one.file, one.size) for one in candidate.manifest.references}
        for file in index.files:
            if file.checkpoint is not None and (file.checkpoint, file.name, file.size) not in known:
                # Only what the manifest names is kept by those who delete.
                reason = f"refers to {file.shown()}, which its manifest does not name"
                raise DamagedCheckpoint(checkpoint=str(name), file=part.file, reason=reason)
    return index


def _read_whole(store: Store, name: CheckpointName, file: str, *, limit: int) -> bytes:
    path = f"{name.folder}/{file}"
    try:
        return store.read(path, max_bytes=limit)
    except StorageError as error:
        # Too large is damage, which a start walks back from; all else is a storage error, which stops it.
        if type(error) is StorageError and (size := store.size(path)) > limit:
            reason = f"has {size} bytes, more than the {limit} it may have"
            raise DamagedCheckpoint(checkpoint=str(name), file=file, reason=reason) from error
        raise
