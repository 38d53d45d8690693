"""A save that is handed over before it is copied: each file is written when it is there, and none before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from spotsafe.checkpoint.catalog import candidates, look
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.verify import verify
from spotsafe.events import SaveFailed
from spotsafe.storage.wrapping import Operation, WrappingStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.saves import StagedSave, stage, steps_of
from spotsafe.testing.sinks import RecordingSink
from spotsafe.writer.copied import BYTES, CopyFailed, Staging
from spotsafe.writer.upload import Uploader

PATIENCE_S = 30.0
FILES = 3


def save(step: int, *, size: int = 4) -> StagedSave:
    """A save of three files, all of it copied."""
    arrays = {name: np.full(size, step, dtype=np.float32) for name in "abc"}
    return stage(CheckpointName(1, step, step, "00000000"), arrays, files=FILES)


class Watched(WrappingStore):
    """Counts the data files that arrive."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.count = 0
        self._arrived = threading.Condition()

    def around(self, operation: Operation, call: Callable[[], object]) -> object:  # type: ignore[override] # any result
        result = call()
        if operation.name == "put_large":
            with self._arrived:
                self.count += 1
                self._arrived.notify_all()
        return result

    def wait_for(self, count: int) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: self.count >= count, PATIENCE_S)


@pytest.fixture
def staging() -> Staging:
    return Staging()


@pytest.fixture
def pool(staging: Staging) -> Iterator[ThreadPoolExecutor]:
    """A writer's thread, which no failed test leaves waiting."""
    with ThreadPoolExecutor(1) as pool:
        yield pool
        staging.fail()


@pytest.mark.parametrize("size", [4, 1 << 20], ids=["small", "with-threads"])
def test_a_file_is_written_as_soon_as_it_is_there(
    pool: ThreadPoolExecutor, staging: Staging, size: int
) -> None:
    """Filled file by file: each arrives before the next has its bytes; the last, and the manifest, at the end."""
    whole, store = save(7, size=size), Watched()
    arena = memoryview(bytearray(len(whole.arena)))
    uploader = Uploader(store, emit=RecordingSink().emit, monotonic=lambda: 0.0)
    done = pool.submit(uploader.run, whole.job, arena, None, staging)
    for number, file in enumerate(whole.job.files):
        end = file.arena_offset + file.size
        assert store.count == number
        arena[file.arena_offset : end] = whole.arena[file.arena_offset : end]
        if number < FILES - 1:
            staging.reached(end)
            store.wait_for(number + 1)
    staging.reached(len(arena))  # the last file waits for the word that all went well
    assert store.count == FILES - 1
    assert not steps_of(candidates(store, look(store)))
    staging.finish()
    result = done.result(PATIENCE_S)
    assert (result.error, result.abandoned) == (None, False)
    assert steps_of(candidates(store, look(store))) == [7]


def test_what_is_never_copied_is_never_published(pool: ThreadPoolExecutor, staging: Staging) -> None:
    """The writer lets go, says nothing in place of whoever copied, and its files go with the next save."""
    one, two, store, sink = save(1), save(2), Watched(), RecordingSink()
    uploader = Uploader(store, emit=sink.emit, monotonic=lambda: 0.0)
    done = pool.submit(uploader.run, one.job, one.arena, None, staging)
    staging.reached(one.job.files[0].size)
    store.wait_for(1)
    staging.fail()
    result = done.result(PATIENCE_S)
    assert (result.published, result.abandoned, result.error) == (False, True, None)
    assert not [event for event in sink.events if isinstance(event, SaveFailed)]
    assert store.inner.names(one.job.name.folder)
    assert pool.submit(uploader.run, two.job, two.arena).result(PATIENCE_S).published
    assert steps_of(candidates(store, look(store))) == [2]
    assert not store.inner.names(one.job.name.folder)


def test_waiting() -> None:
    """For a part, for all, and for what never comes."""
    staging = Staging()
    staging.wait(0)
    staging.reached(10)
    staging.reached(5)  # no step back
    staging.wait(10)
    staging.finish()
    staging.wait(11)
    staging.wait()
    failed = Staging()
    failed.reached(10)
    failed.fail()
    for end in (None, 5):  # half a state is none
        with pytest.raises(CopyFailed):
            failed.wait(end)


def test_a_later_copy_is_not_taken_for_an_earlier_one() -> None:
    """A writer that was thought dead may still look: the arena is that of another step by then."""
    words = memoryview(bytearray(BYTES))
    later, earlier = Staging(words, serial=2), Staging(words, serial=1)
    for end in (None, 5):
        later.begin()
        later.finish()
        later.wait(end)
        with pytest.raises(CopyFailed):
            earlier.wait(end)


def test_who_copies_may_end_right_behind_the_last_byte() -> None:
    """What was complete by then counts, in whichever order the writer learns of the two; half of it never."""
    words = memoryview(bytearray(BYTES))
    trainer = Staging(words, serial=1)
    trainer.begin()
    trainer.reached(10)

    def ends_when_done() -> bool:
        trainer.finish()
        return True

    with pytest.raises(CopyFailed):
        Staging(words, serial=1, gone=lambda: True).wait()
    Staging(words, serial=1, gone=ends_when_done).wait()


def test_waiting_for_the_writer() -> None:
    """For a place that can be used again, or for a writer that will not come to it any more."""
    staging = Staging()
    assert staging.wait_written(0, lives=lambda: False)
    staging.written(10)
    assert staging.wait_written(10, lives=lambda: False)
    alive = [True, True, False]
    assert not staging.wait_written(11, lives=lambda: alive.pop(0))
    staging.begin()
    assert not staging.wait_written(1, lives=lambda: False)


def test_the_writer_needs_a_piece_until_it_says_so(pool: ThreadPoolExecutor, staging: Staging) -> None:
    """Files that come one after the other to the same place are each written before the next one is asked for."""
    whole, store, sink = save(7), Watched(), RecordingSink()
    uploader = Uploader(store, emit=sink.emit, monotonic=lambda: 0.0)
    slot = memoryview(bytearray(max(file.size for file in whole.job.files)))
    job = replace(whole.job, streamed=True)
    done = pool.submit(uploader.run, job, slot, None, staging)
    end = 0
    for number, file in enumerate(job.files):
        assert staging.wait_written(end, lives=lambda: not done.done())
        assert store.count == number
        slot[: file.size] = whole.arena[file.arena_offset : file.arena_offset + file.size]
        end = file.arena_offset + file.size
        staging.reached(end)
    assert not steps_of(candidates(store, look(store)))
    staging.finish()
    result = done.result(PATIENCE_S)
    assert (result.error, result.published) == (None, True)
    assert verify(store, job.name) == []
