"""The state whose every step is crashed, what lives do with it, and what must hold when one has ended.

A checkpoint is made by two ranks: three data files, two indexes, and a file with a frozen tensor that later saves refer
to. That of step `LARGE`, or any whole number of `STRIDE` later, has a file of three multipart parts; no server takes
smaller parts than 5 MiB. Both ranks live in one process, the second one first, so that the steps come in the same order
each time.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
from msgspec import structs

from spotsafe.checkpoint.candidates import by_folder, candidates, look
from spotsafe.checkpoint.digest import block_digests
from spotsafe.checkpoint.index import FileEntry, TensorEntry
from spotsafe.checkpoint.layout import CHECKPOINTS, CheckpointName, data_file, is_frozen_file
from spotsafe.checkpoint.manifest import Manifest, Part
from spotsafe.checkpoint.verify import verify
from spotsafe.cli import gc as command
from spotsafe.events import CheckpointPublished, Event
from spotsafe.policy.retention import latest
from spotsafe.reader import choose, load_verified
from spotsafe.storage.parts import MIN_PART
from spotsafe.storage.store import Store
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.saves import Attempt, stage
from spotsafe.writer.job import SaveJob, SaveResult
from spotsafe.writer.upload import Uploader
from tests.killed import Crash

Seen = set[CheckpointName]
Tell = Callable[[Event], object]

PART = MIN_PART
"""Bytes of a multipart part."""
LARGE, STRIDE = 10, 1000
"""The steps whose first file has three parts."""
SHARED = 6
"""Elements of the second rank."""
FROZEN = np.arange(6, dtype=np.float32)
RENEWED_S = 90_000.0
"""Seconds of run time after which the frozen file is written anew."""


# -- saves of two ranks ---


@lru_cache(maxsize=8)
def values(step: int) -> Mapping[str, npt.NDArray[np.float32]]:
    """All tensors of a checkpoint of this step, as a resume must find them."""
    size = (2 * PART // 4 if step % STRIDE == LARGE else 100) + SHARED
    return {
        "weight": np.arange(size, dtype=np.float32) + step,
        "bias": np.full(3, step, dtype=np.float32),
        "frozen": FROZEN,
    }


class FirstRank(Uploader):
    """Publishes what the ranks have written together."""

    others: tuple[Part, ...] = ()
    others_bytes: int = 0

    def _publish(self, job: SaveJob, manifest: Manifest, progress: Any) -> None:
        parts, size = (*manifest.parts, *self.others), manifest.total_bytes + self.others_bytes
        super()._publish(job, replace(manifest, parts=parts, total_bytes=size), progress)


class SecondRank(Uploader):
    """Writes its part, and leaves the rest to the first."""

    def write(self, job: SaveJob, arena: memoryview) -> tuple[Part, int]:
        """Its files and its index; the latter as the manifest has it, and the bytes of the former."""
        files = []
        for file in job.files:
            data = arena[file.arena_offset : file.arena_offset + file.size]
            self._write_file(job, file.name, data)
            files.append(FileEntry(name=file.name, size=file.size, digests=block_digests(data)))
        part = self._write_index(job, tuple(files))
        self._confirm(job, files, part)
        return part, sum(file.size for file in files)


class TwoRanks(Attempt):
    """One start of a run of two ranks.

    Args:
        store: the run.
        tell: receives the events of the first rank.
        keep: how many checkpoints.
    """

    def __init__(self, store: Store, *, tell: Tell = lambda _: None, keep: int = 2) -> None:
        super().__init__(store, keep=latest(keep))
        self._first = FirstRank(store, emit=tell, monotonic=float, ended_at=lambda _: 0.0)
        self._second = SecondRank(store, emit=lambda _: None, monotonic=float)

    def name_of(self, step: int) -> CheckpointName:
        """The name of the next save."""
        return CheckpointName(self.record.attempt, step, len(self.results) + 1, self.record.nonce)

    def save(self, step: int, **_: Any) -> SaveResult:
        """The second rank writes, the first one too, and publishes."""
        name, all_of = self.name_of(step), values(step)
        parent = None if self.resumed_from is None else str(self.resumed_from.name)
        told = {"run": self.record.run, "keep": self._keep, "parent": parent, "world_size": 2}
        second = stage(name, {"weight": all_of["weight"][-SHARED:]}, rank=1, **told)
        self._first.others = ()
        part, size = self._second.write(_sharded(second.job), second.arena)
        self._first.others, self._first.others_bytes = (part,), size
        first = stage(
            name,
            {"weight": all_of["weight"][:-SHARED], "bias": all_of["bias"]},
            files=2,
            frozen=[{"frozen": FROZEN}],
            held=self._held_files().get,
            **told,
        )
        result = self._first.run(_sharded(first.job), first.arena, first.frozen)
        if isinstance(result.error, Crash):
            raise result.error
        self._held_files().note_result(result)
        self.results.append(result)
        return result

    def begin(self, step: int, store: Store) -> None:
        """Come as far with a save as to the first file of the first rank."""
        name = self.name_of(step)
        second = stage(name, {"weight": values(step)["weight"][-SHARED:]}, rank=1, world_size=2)
        self._second.write(_sharded(second.job), second.arena)
        store.put_large(name.file(data_file(0, 1)), memoryview(b"half of a save"))


def _sharded(job: SaveJob) -> SaveJob:
    """Both ranks have elements of one tensor, the second one the last few."""
    size = values(job.name.step)["weight"].size

    def cut(entry: TensorEntry) -> TensorEntry:
        if entry.name != "weight":
            return entry
        [piece] = entry.slices
        offset = (size - SHARED) * job.rank
        return structs.replace(entry, shape=(size,), slices=(structs.replace(piece, offsets=(offset,)),))

    return replace(job, tensors=tuple(map(cut, job.tensors)))


# -- lives ---


@dataclass(frozen=True, kw_only=True)
class Life:
    """What a process does from its start on, and what lies there before."""

    name: str
    before: Callable[[], Before]
    live: Callable[[Store, Tell], object]
    """Raises what keeps it from coming to its end."""
    unanswered: str = ""
    """See `Steps.unanswered`."""


@dataclass(frozen=True, kw_only=True)
class Before:
    """A run's folder before a life."""

    objects: Mapping[str, bytes]
    begun: str
    """Path of an upload that was begun and never completed."""
    published: frozenset[CheckpointName]


@cache
def killed_in_its_fourth_save() -> Before:
    """An attempt has published three times and was killed in a save."""
    return _killed(MemoryStore())


def _killed(store: MemoryStore) -> Before:
    first = TwoRanks(store, keep=3)
    for step in (1, 2, 3):
        assert first.save(step).published
    first.begin(4, store)
    return Before(
        objects=store.objects,
        begun=first.name_of(4).file(data_file(0, 0)),
        published=frozenset(published(store)),
    )


@cache
def killed_twice_and_started_again() -> Before:
    """A second attempt has published once and was killed in a save; a third one has just claimed."""
    store = MemoryStore()
    _killed(store)
    second = TwoRanks(store)
    assert second.save(8).published
    second.begin(9, store)
    Attempt(store)
    return Before(
        objects=store.objects,
        begun=second.name_of(9).file(data_file(0, 0)),
        published=frozenset(published(store)),
    )


def save_on(store: Store, tell: Tell) -> None:
    """Resume, claim, and save three times, with the sweep and retention behind each publish.

    The first save refers to the file of the checkpoint resumed from, the second writes it anew, the third refers to
    that; the last withdraws a checkpoint of this very attempt.
    """
    resume(store)
    attempt = TwoRanks(store, tell=tell)
    for step in (10, 11, 12):
        result = attempt.save(step)
        assert result.published, result
        assert result.error is None, result
        attempt.now += RENEWED_S if step == 10 else 0.0


def save_once(store: Store, tell: Tell) -> None:
    """Claim, and save; nothing is old enough to be withdrawn."""
    result = TwoRanks(store, tell=tell, keep=9).save(LARGE)
    assert result.published, result
    assert result.error is None, result


def clean_up(store: Store, _tell: Tell) -> None:
    """``spotsafe gc --delete``."""
    callback = command.command.callback
    assert callback is not None
    opened = mock.patch.object(command, "open_target", return_value=(store, None))
    with redirect_stdout(io.StringIO()), opened:
        callback(store.url, delete=True, as_json=True)


SAVING = Life(
    name="claim, three saves, sweep and retention",
    before=killed_in_its_fourth_save,
    live=save_on,
)
FAILING_PART = Life(
    name="claim, and a save of which a part fails",
    before=killed_in_its_fourth_save,
    live=save_once,
    unanswered="partNumber=2",
)
CLEANING = Life(name="spotsafe gc --delete", before=killed_twice_and_started_again, live=clean_up)


# -- judging ---


def note(seen: Seen) -> Tell:
    """Remembers what was said to be published."""

    def tell(event: Event) -> None:
        if isinstance(event, CheckpointPublished):
            seen.update(names_in(event.checkpoint))

    return tell


def names_in(text: str) -> Seen:
    """The checkpoints that a text names."""
    return {name for word in text.split() if (name := CheckpointName.parse(word)) is not None}


def published(store: Store) -> list[CheckpointName]:
    """What is published now, newest first."""
    return [one.name for one in candidates(store, look(store)) if one.manifest is not None]


def resume(store: Store) -> CheckpointName | None:
    """Read what a start chooses, as a start does; the values are those of its step, or this is a torn load."""
    choice = choose(store, look(store))
    if choice is None:
        return None
    loaded = load_verified(store, choice.candidate, threads=1)
    expected = values(loaded.name.step)
    assert loaded.saved.tensors.keys() == expected.keys()
    for key, array in expected.items():
        assert np.array_equal(loaded.saved.tensors[key].numpy(), array), f"{key} of {loaded.name}"
    return loaded.name


def judge(store: Store, seen: Seen) -> None:
    """The newest two that anybody ever saw published are there; all that is there is whole, and is what is loaded."""
    now = published(store)
    seen.update(now)
    assert now[:2] == sorted(seen, reverse=True)[:2], "nothing published is lost"
    assert resume(store) == (now[0] if now else None)
    for name in now[1:]:
        assert verify(store, name) == [], f"{name} is whole"


def go_on(store: Store, seen: Seen) -> None:
    """A new attempt goes on from the newest, and its first publish leaves no garbage of others."""
    newest = max(seen)
    attempt = TwoRanks(store, tell=note(seen))
    assert attempt.resumed_from is not None
    assert attempt.resumed_from.name == newest
    result = attempt.save(100)
    assert result.published, result
    assert result.error is None, result
    assert resume(store) == result.name
    now = published(store)
    assert now == [result.name, newest]
    assert verify(store, newest) == []
    for name, sizes in by_folder(store.list(CHECKPOINTS)).items():
        if name not in now:
            left = {path.rpartition("/")[2] for path in sizes if path != name.manifest}
            assert all(map(is_frozen_file, left)), f"no garbage is left in {name}: {left}"
    assert store.begun(CHECKPOINTS) == [], "no upload is left"


def go_on_after(life: Life, store: Store, seen: Seen) -> None:
    """Whatever became of a life: judge what is left, and let the next attempt go on from it.

    Args:
        life: what was done.
        store: the run, in good order.
        seen: what anybody saw published; updated.
    """
    judge(store, seen)
    if life is CLEANING:
        clean_up(store, note(seen))
        judge(store, seen)
    go_on(store, seen)
