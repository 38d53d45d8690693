"""Deleting: retention of published checkpoints, and the remains of saves that were never published.

A checkpoint is withdrawn before its files are touched, and each withdrawal is confirmed by reading it back:
there is no instant at which a published checkpoint lacks a file. What any published manifest refers to stays.
What the store refuses to delete stays as garbage and is reported; it never makes a save fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field

from spotsafe.checkpoint.branch import Branch, is_set_aside
from spotsafe.checkpoint.candidates import Candidate, by_folder, missing_from, read_candidate
from spotsafe.checkpoint.deleting import Emit, decide, delete_files, files_in, is_strange, withdraw
from spotsafe.checkpoint.layout import (
    CHECKPOINTS,
    LEDGER,
    CheckpointName,
    is_frozen_file,
    ledger_folder,
    parse_ledger_folder,
)
from spotsafe.checkpoint.manifest import Manifest, Marker
from spotsafe.checkpoint.pins import pinned, pinned_manifests
from spotsafe.checkpoint.references import Needed, needed_by
from spotsafe.errors import StorageError, StorageUnavailable, UnsupportedFormat
from spotsafe.events import CheckpointRetired, DeleteRefused, Warned
from spotsafe.policy.retention import Keep, Saved, victims
from spotsafe.storage.store import Entry, Store

MayDelete = Callable[[CheckpointName], bool]
Known = MutableMapping[CheckpointName, Candidate]


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
    one = _Pass(
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
    gone = one.retire(sorted(name for name in one.published if str(name) in withdrawn))
    one.trim(is_frozen_file, below=attempt + 1)
    return gone


def retire(
    store: Store,
    names: Iterable[CheckpointName],
    *,
    attempt: int,
    on_event: Emit,
    known: Known | None = None,
    now: float = 0.0,
) -> list[CheckpointName]:
    """Withdraw chosen checkpoints, as `apply_retention` does with those that its policy does not keep.

    Returns:
        What was withdrawn; what a reader has pinned, or the store did not let go, stays.

    Raises:
        StorageError: the store could not say what is there (nothing was deleted), or stopped answering.
    """
    one = _Pass(
        store=store,
        attempt=attempt,
        on_event=on_event,
        known={} if known is None else known,
        may_delete=anything,
        now=now,
    )
    return one.retire(name for name in names if name in one.published) if one.look() else []


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
    published after all and stays. Only when all names are decided, and it is known what those that exist refer
    to, files are deleted; also those that a withdrawn checkpoint still has and nobody needs.

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
    one = _Pass(
        store=store,
        attempt=attempt,
        on_event=on_event,
        known={} if known is None else known,
        may_delete=may_delete,
        now=now,
    )
    swept = []
    if one.look(strangers=True):
        one.decide_all()
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


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One look at the run, and what is deleted on the strength of it."""

    store: Store
    attempt: int
    on_event: Emit
    known: Known
    may_delete: MayDelete
    now: float
    folders: dict[CheckpointName, dict[str, int]] = field(default_factory=dict)
    published: dict[CheckpointName, Manifest] = field(default_factory=dict)
    """Every checkpoint that exists and can be read."""
    markers: dict[CheckpointName, Marker] = field(default_factory=dict)

    def look(self, *, strangers: bool = False) -> bool:
        """List the run and read its manifests; whether anything may be deleted.

        Args:
            strangers: whether to tell about what is not ours.
        """
        entries = self.store.list(CHECKPOINTS)
        self.folders = by_folder(entries)
        if strangers:
            self._tell_strangers(entries)
        listed = [name for name, sizes in self.folders.items() if name.manifest in sizes]
        unlisted = [name for name, one in self.known.items() if one.manifest and name not in listed]
        found = [self._read(name) for name in (*listed, *unlisted)]
        for one in found:
            self._take(one)
        return not self._is_obstructed(found)

    def decide_all(self) -> None:
        """Decide the name of every unpublished checkpoint of an older attempt."""
        open_ = [name for name in sorted(self.folders) if self._is_open(name) and self.may_delete(name)]
        kept = pinned(self.store, open_, now=self.now)
        for name in open_:
            if name in kept:
                continue
            try:
                self._take(decide(self.store, name, published=False))
            except StorageUnavailable:
                raise
            except StorageError as error:
                self.on_event(DeleteRefused(path=name.folder, error=str(error)))

    def retire(self, names: Iterable[CheckpointName]) -> list[CheckpointName]:
        """Withdraw checkpoints: all manifests first, each confirmed; then the files of those confirmed.

        What a reader has pinned is left alone: looked for before the first manifest, and again before the first
        file.
        """
        chosen = list(filter(self.may_delete, names))
        kept = pinned(self.store, chosen, now=self.now)
        doomed = [name for name in chosen if name not in kept]
        needed = self._needed(without=doomed)
        gone: dict[CheckpointName, Marker | None] = {}
        for name in doomed:
            self.known.pop(name, None)
            in_use = needed.among(name, files_in(name, self.folders.get(name, {})))
            try:
                gone[name] = withdraw(self.store, name, attempt=self.attempt, in_use=in_use)
            except StorageUnavailable:
                raise
            except StorageError as error:
                self.on_event(DeleteRefused(path=name.manifest, error=str(error)))
            else:
                del self.published[name]
        needed = (
            self._needed()
        )  # again: what could not be withdrawn, or was pinned meanwhile, needs its files
        kept = pinned(self.store, gone, now=self.now)
        for name, marker in gone.items():
            if name not in kept:
                self._delete(name, marker, needed)
            self.on_event(CheckpointRetired(checkpoint=str(name)))
        return list(gone)

    def trim(self, matches: Callable[[str], bool], *, below: int) -> list[CheckpointName]:
        """Delete what checkpoints that are gone still have and nobody needs.

        Args:
            matches: which files, by name; the others do not matter.
            below: only of attempts lower than this one.
        """
        remains = {
            name: frozenset(filter(matches, files_in(name, self.folders[name])))
            for name in sorted(self.markers)
            if name.attempt < below and name in self.folders and self.may_delete(name)
        }
        wanted = [name for name, files in remains.items() if files]
        if not wanted:
            return []
        needed = self._needed()
        doomed = [name for name in wanted if remains[name] - needed.among(name, remains[name])]
        # A withdrawn checkpoint can be pinned, but no longer be newly pinned: one look is enough.
        kept = pinned(self.store, doomed, now=self.now)
        trimmed = [name for name in doomed if name not in kept]
        for name in trimmed:
            self._delete(name, self.markers[name], needed)
        return trimmed

    # -- inside

    def _read(self, name: CheckpointName) -> Candidate:
        candidate = self.known.get(name)
        if candidate is None:
            candidate = read_candidate(self.store, name)  # one after the other: this runs behind training
            if candidate.manifest is not None or candidate.marker is not None:
                self.known[name] = candidate  # only these two are final
        return candidate

    def _take(self, candidate: Candidate) -> None:
        if candidate.manifest is not None:
            self.published[candidate.name] = candidate.manifest
        elif candidate.marker is not None:
            self.markers[candidate.name] = candidate.marker

    def _is_obstructed(self, found: Iterable[Candidate]) -> bool:
        for candidate in found:
            if isinstance(candidate.fault, UnsupportedFormat):
                obstacle = str(candidate.fault)
            elif candidate.name.attempt > self.attempt and not candidate.absent:
                obstacle = f"{candidate.name} is of a newer attempt"
            else:
                if candidate.fault is not None:
                    self.on_event(Warned(message=f"{candidate.fault}. It is neither counted nor deleted"))
                continue
            self.on_event(Warned(message=f"nothing is deleted: {obstacle}"))
            return True
        return False

    def _is_open(self, name: CheckpointName) -> bool:
        """Whether an older attempt began the checkpoint and nobody has decided its name."""
        sizes = self.folders[name]
        decided = name.attempt >= self.attempt or name in self.published or name in self.markers
        return not (decided or name.manifest in sizes or is_strange(name, sizes)) and bool(
            files_in(name, sizes)
        )

    def _needed(self, *, without: Iterable[CheckpointName] = ()) -> Needed:
        """The files that checkpoints need of other folders, once those of `without` are gone."""
        if not any(
            is_frozen_file(path.rpartition("/")[2]) for sizes in self.folders.values() for path in sizes
        ):
            return Needed()  # as in most runs
        undecided = next((name for name in self.folders if self._is_open(name)), None)
        unknown = "" if undecided is None else f"{undecided} may still be published"
        kept = pinned_manifests(self.store, now=self.now)
        if kept is None:
            unknown = "a reader's pin cannot be read"
        leaving = set(without)
        staying = [manifest for name, manifest in self.published.items() if name not in leaving]
        return needed_by([*staying, *(kept or ())], unknown=unknown)

    def _delete(self, name: CheckpointName, marker: Marker | None, needed: Needed) -> None:
        self.known.pop(name, None)  # its marker may change
        delete_files(
            self.store, name, marker=marker, needed=needed, attempt=self.attempt, on_event=self.on_event
        )

    def _tell_strangers(self, entries: Iterable[Entry]) -> None:
        """What lies where a checkpoint or its manifest would, and was not made by us, is told and left alone."""
        for entry in entries:
            top, _, rest = entry.path.partition("/")
            if top == CHECKPOINTS and CheckpointName.parse(rest) is not None:
                self._tell_stranger(entry.path, "a file where the folder of a checkpoint would be")
        for name, sizes in self.folders.items():
            if name.manifest not in sizes and is_strange(name, sizes):
                self._tell_stranger(name.manifest, "a folder where a manifest would be")

    def _tell_stranger(self, path: str, what: str) -> None:
        self.on_event(Warned(message=f"{path} is {what}; it is not ours and is left alone. Move it away"))


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


__all__ = ["Retention", "anything", "apply_retention", "discard", "retire", "sweep"]
