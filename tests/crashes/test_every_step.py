"""Every step of a save, publish, retention and gc goes wrong, on local disk and on SeaweedFS: nothing is torn or lost.

The very same lives of the very same state on both, with each storage operation and each thing that it consists of: on
disk the system calls that change it, on SeaweedFS the requests, those of a multipart upload among them. A crash here is
an exception that nobody catches, and after it nothing reaches the store, whatever code still runs. To a server that is
no different from a process that is gone: it keeps what it was sent. To a disk it is not either, but there
`test_real_processes` ends real processes at the same steps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from unittest import mock

import pytest

from spotsafe.checkpoint.layout import index_file
from spotsafe.errors import StorageNotFound
from spotsafe.storage.retrying import RetryingStore
from spotsafe.storage.store import Store
from spotsafe.storage.wrapping import WrappingStore
from tests.crashes.lives import CLEANING, FAILING_PART, SAVING, Life, go_on_after, note
from tests.crashes.places import Disk, Level, Place, Seaweed
from tests.crashes.steps import KINDS, Kind, Steps
from tests.killed import Crash
from tests.proof import record as write_down

pytestmark = pytest.mark.slow

LIVES = [SAVING, CLEANING]
SHARES = {"local disk": 40, "SeaweedFS": 80}
"""Of the steps one in so many goes wrong each time; all of them by `make prove`."""


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    """A folder. What is not synced survives the end of a process too, so nobody waits for the disk."""
    with mock.patch.object(os, "fsync"), mock.patch.object(os, "fdatasync"):
        yield Disk(tmp_path_factory.mktemp("runs"))


def once(place: Place, life: Life, level: Level, steps: Steps) -> bool:
    """Live with these steps, and go on; whether the life came to its end."""
    before, ended = life.before(), False
    store, seen = place.lay(before), set(before.published)
    steps.unanswered = life.unanswered
    with place.faulty(store, level, steps) as faulty, suppress(Crash):
        life.live(RetryingStore(faulty, sleep=lambda _seconds: None), note(seen))
        ended = True
    go_on_after(life, store, seen)
    return ended


def enumerate_steps(place: Place, life: Life, level: Level, kind: Kind, share: int) -> None:
    """Let one in so many go wrong, beginning with another one for each kind; write down how many there were."""
    made = place.made.get((life.name, level))
    if made is None:
        whole = Steps()
        assert once(place, life, level, whole)
        made = place.made[life.name, level] = whole.made
    points = range(1 + KINDS.index(kind) * share // len(KINDS), len(made) + 1, share)
    for at in points:
        steps = Steps(at, kind)
        ended = once(place, life, level, steps)
        assert steps.fired
        assert ended == kind.startswith("lost"), f"{kind} {made[at - 1]}"
    what = "storage operation" if level == "operations" else place.inside
    write_down(f"{life.name}, on {place.name}: {kind} each {what}", steps=len(made), tried=len(points))


share = pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.prove)], ids=["share", "all"]
)


@share
@pytest.mark.parametrize(
    ("level", "kind"), [*(("operations", kind) for kind in KINDS), ("inside", "before"), ("inside", "after")]
)
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.name)
def test_on_local_disk(disk: Disk, life: Life, level: Level, kind: Kind, whole: bool) -> None:
    """Before it, after it, or with its answer lost: the next attempt resumes from the newest checkpoint, whole.

    The answer of a system call cannot be lost.
    """
    enumerate_steps(disk, life, level, kind, 1 if whole else SHARES[disk.name])


@share
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.name)
def test_on_seaweedfs(bucket: Seaweed, life: Life, kind: Kind, whole: bool) -> None:
    """The same; each operation begins and ends with a request."""
    enumerate_steps(bucket, life, "inside", kind, 1 if whole else SHARES[bucket.name])


@pytest.mark.prove
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.name)
def test_lost_operations_on_seaweedfs(bucket: Seaweed, life: Life) -> None:
    """An answer that is lost behind all that the client does about lost requests: the whole operation is repeated."""
    enumerate_steps(bucket, life, "operations", "lost", 1)


@share
@pytest.mark.parametrize("kind", KINDS)
def test_an_upload_that_begins_again(bucket: Seaweed, kind: Kind, whole: bool) -> None:
    """A part fails, the upload is aborted, and begun once more: at each request of that too."""
    enumerate_steps(bucket, FAILING_PART, "inside", kind, 1 if whole else SHARES[bucket.name])
    assert any(made.startswith("DELETE") for made in bucket.made[FAILING_PART.name, "inside"]), "an abort"


class Hasty(WrappingStore):
    """Writes each index of the first rank only when its manifest is there, as nobody should."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._late: list[tuple[str, bytes]] = []

    def put(self, path: str, data: bytes) -> None:
        self._late.append((path, data))
        if not path.endswith(index_file(0)):
            self._write()

    def size(self, path: str) -> int:
        return {path: len(data) for path, data in self._late}.get(path) or super().size(path)

    def create(self, path: str, data: bytes) -> bool:
        created = super().create(path, data)
        self._write()
        return created

    def _write(self) -> None:
        while self._late:
            super().put(*self._late.pop())


def test_a_torn_checkpoint_is_found(disk: Disk) -> None:
    """A crash where the manifest is there and an index is not: the judgement that finds nothing can find something."""
    hasty = replace(SAVING, live=lambda store, tell: SAVING.live(Hasty(store), tell))
    whole = Steps()
    assert once(disk, hasty, "operations", whole)
    kinds = [made.split()[0] + made.rpartition("/")[2] for made in whole.made]
    with pytest.raises(StorageNotFound, match=index_file(0)):
        once(disk, hasty, "operations", Steps(1 + kinds.index("createmanifest.json"), "after"))
