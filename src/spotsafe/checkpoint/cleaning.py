"""One look at a run, and what is deleted on the strength of it. `gc` says when, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field

from spotsafe.checkpoint.candidates import Candidate, by_folder, read_candidate
from spotsafe.checkpoint.deleting import Emit, decide, delete_files, files_in, is_strange, withdraw
from spotsafe.checkpoint.layout import CHECKPOINTS, CheckpointName, is_frozen_file
from spotsafe.checkpoint.manifest import Manifest, Marker
from spotsafe.checkpoint.pins import pinned, pinned_manifests
from spotsafe.checkpoint.references import Needed, needed_by
from spotsafe.errors import StorageError, StorageUnavailable, UnsupportedFormat
from spotsafe.events import CheckpointRetired, DeleteRefused, Warned
from spotsafe.storage.store import Entry, Store

MayDelete = Callable[[CheckpointName], bool]
Known = MutableMapping[CheckpointName, Candidate]


@dataclass(slots=True, kw_only=True)
class Cleaning:
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
        self.folders, self.published, self.markers = by_folder(entries), {}, {}
        if strangers:
            self._tell_strangers(entries)
        listed = [name for name, sizes in self.folders.items() if name.manifest in sizes]
        unlisted = [name for name, one in self.known.items() if one.manifest and name not in listed]
        found = [self.read(name) for name in (*listed, *unlisted)]
        for one in found:
            self._take(one)
        return not self._is_obstructed(found)

    def decide_all(self) -> bool:
        """Decide the name of every unpublished checkpoint of an older attempt; whether there was any."""
        open_ = [name for name in sorted(self.folders) if self.is_open(name) and self.may_delete(name)]
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
        return bool(open_)

    def retire(self, names: Iterable[CheckpointName]) -> list[CheckpointName]:
        """Withdraw checkpoints: all manifests first, each confirmed; then the files of those confirmed.

        What a reader has pinned is left alone: looked for before the first manifest, and again before the first
        file.
        """
        chosen = list(filter(self.may_delete, names))
        kept = pinned(self.store, chosen, now=self.now)
        doomed = [name for name in chosen if name not in kept]
        needed = self.needed(without=doomed)
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
        # Again: what could not be withdrawn, or was pinned meanwhile, needs its files.
        needed = self.needed(to_delete=bool(gone))
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
        needed = self.needed(to_delete=True)
        doomed = [name for name in wanted if remains[name] - needed.among(name, remains[name])]
        # A withdrawn checkpoint can be pinned, but no longer be newly pinned: one look is enough.
        kept = pinned(self.store, doomed, now=self.now)
        trimmed = [name for name in doomed if name not in kept]
        for name in trimmed:
            self._delete(name, self.markers[name], needed)
        return trimmed

    def is_open(self, name: CheckpointName) -> bool:
        """Whether an older attempt began the checkpoint and nobody has decided its name."""
        sizes = self.folders[name]
        decided = name.attempt >= self.attempt or name in self.published or name in self.markers
        return not (decided or name.manifest in sizes or is_strange(name, sizes)) and bool(
            files_in(name, sizes)
        )

    def needed(self, *, without: Iterable[CheckpointName] = (), to_delete: bool = False) -> Needed:
        """The files that checkpoints need of other folders, once those of `without` are gone.

        Args:
            without: checkpoints that will be withdrawn.
            to_delete: the answer is the last one before files are deleted. While the manifests were read, another
                attempt may have published a checkpoint and withdrawn all those that were listed: then nobody here
                knows what the new one refers to.
        """
        if not any(
            is_frozen_file(path.rpartition("/")[2]) for sizes in self.folders.values() for path in sizes
        ):
            return Needed()  # as in most runs
        undecided = next((name for name in self.folders if self.is_open(name)), None)
        unknown = "" if undecided is None else f"{undecided} may still be published"
        kept = pinned_manifests(self.store, now=self.now)
        if kept is None:
            unknown = "a reader's pin cannot be read"
        if to_delete and self._has_grown():
            unknown = "another checkpoint was published meanwhile"
        leaving = set(without)
        staying = [manifest for name, manifest in self.published.items() if name not in leaving]
        return needed_by([*staying, *(kept or ())], unknown=unknown)

    def read(self, name: CheckpointName) -> Candidate:
        """A manifest or marker, once."""
        candidate = self.known.get(name)
        if candidate is None:
            candidate = read_candidate(self.store, name)  # one after the other: this runs behind training
            if candidate.manifest is not None or candidate.marker is not None:
                self.known[name] = candidate  # only these two are final
        return candidate

    # -- inside

    def _has_grown(self) -> bool:
        """Whether a manifest is there that the look did not see."""
        return any(
            name.manifest in sizes
            and name.manifest not in self.folders.get(name, {})
            and name not in self.published
            and name not in self.markers
            for name, sizes in by_folder(self.store.list(CHECKPOINTS)).items()
        )

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
