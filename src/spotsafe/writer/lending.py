"""Frozen tensors: their files are written once, and later saves refer to them (rule 6 of docs/DESIGN.md, section 3).

`HeldFiles` is what an attempt remembers of such files. `Lender` decides for one file of one save, in the writer,
whether it may be referred to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from spotsafe.checkpoint.candidates import read_candidate
from spotsafe.checkpoint.index_values import FileEntry
from spotsafe.checkpoint.layout import CheckpointName, is_frozen_file
from spotsafe.errors import StorageNotFound
from spotsafe.storage.store import Store
from spotsafe.writer.job import FrozenFile, Held, SaveResult

RENEW_S = 86_400.0
"""Seconds of run time after which a file is written anew, so that no single object carries the whole run."""


class HeldFiles:
    """Which files with frozen tensors lie on storage, as far as this attempt knows, and how old they are.

    Args:
        monotonic: seconds that never go back.
        renew_s: seconds of run time after which a file counts as too old to be referred to again.
    """

    def __init__(self, monotonic: Callable[[], float], *, renew_s: float = RENEW_S) -> None:
        self._monotonic = monotonic
        self._renew_s = renew_s
        self._held: dict[str, tuple[Held, float]] = {}  # file -> what is known, and when its age was taken

    def note(self, checkpoint: CheckpointName, files: Iterable[FileEntry]) -> None:
        """Take the files of a checkpoint that this attempt published, or has read as published, for the held ones."""
        now, seen = self._monotonic(), str(checkpoint)
        self._held = {
            one.name: (
                Held(
                    checkpoint=one.checkpoint or seen,
                    seen_in=seen,
                    size=one.size,
                    digests=one.digests,
                    age_s=one.age_s,
                ),
                now,
            )
            for one in files
            if is_frozen_file(one.name)
        }

    def note_result(self, result: SaveResult) -> list[str]:
        """Take the files of a save.

        Returns:
            Files that were written anew although nobody thought that they had changed or were too old.
        """
        if not result.published:
            return []
        before = {name: held.digests for name, (held, _) in self._held.items()}
        self.note(result.name, result.frozen)
        return [
            one.name
            for one in result.frozen
            if one.checkpoint is None and before.get(one.name, one.digests) != one.digests
        ]

    def get(self, file: str) -> Held | None:
        """What may be referred to under this name, with its age of now; None if there is none, or it is too old."""
        if file not in self._held:
            return None
        held, taken = self._held[file]
        aged = replace(held, age_s=held.age_s + self._monotonic() - taken)
        return aged if aged.age_s < self._renew_s else None


class Lender:
    """Decides in the writer of one attempt whether a file is referred to.

    Args:
        store: the run.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._published: set[str] = set()

    def note_published(self, name: CheckpointName) -> None:
        """This writer has made the checkpoint exist."""
        self._published.add(str(name))

    def lent(self, file: FrozenFile, digests: tuple[str, ...] | None) -> FileEntry | None:
        """The file as one of another checkpoint; None if it must be written.

        Args:
            file: what the save wants.
            digests: of its bytes now; None if they are known to be those of then.

        Raises:
            StorageNotFound: it must be written, and its bytes are not at hand.
            StorageError: the store could not say whether it is there.
        """
        held = file.held
        fits = held is not None and held.size == file.size and digests in {None, held.digests}
        if held is not None and fits and self._is_published(held) and self._is_there(held, file):
            return FileEntry(
                name=file.name,
                size=file.size,
                digests=held.digests,
                checkpoint=held.checkpoint,
                age_s=held.age_s,
            )
        if digests is None:
            owner = "no checkpoint" if held is None else held.checkpoint
            raise StorageNotFound(
                f"{file.name} of {owner}, to which this save would refer, is not there any more; "
                "the next save writes it again",
                path=file.name,
            )
        return None

    def _is_published(self, held: Held) -> bool:
        """Whether this writer has read the manifest that names the file as published."""
        name = CheckpointName.parse(held.seen_in)
        if held.seen_in not in self._published and name is not None:
            manifest = read_candidate(self._store, name).manifest
            lent = {one.checkpoint for one in manifest.references} if manifest else set()
            if manifest and held.checkpoint in {held.seen_in, *lent}:
                self._published.add(held.seen_in)
        return held.seen_in in self._published

    def _is_there(self, held: Held, file: FrozenFile) -> bool:
        owner = CheckpointName.parse(held.checkpoint)
        try:
            return owner is not None and self._store.size(owner.file(file.name)) == file.size
        except StorageNotFound:
            return False
