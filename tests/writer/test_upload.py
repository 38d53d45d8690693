"""One save: order, health, every failure, and what is cleaned up after it."""

from __future__ import annotations

import gc as garbage
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from safetensors.numpy import load

from spotsafe.checkpoint.attempts import encode_record
from spotsafe.checkpoint.candidates import candidates, look, read_candidate, read_index
from spotsafe.checkpoint.layout import (
    CheckpointName,
    attempt_published,
    attempt_record,
    data_file,
    index_file,
)
from spotsafe.checkpoint.manifest import Manifest
from spotsafe.checkpoint.verify import verify
from spotsafe.errors import (
    StorageError,
    StorageFull,
    StorageNotFound,
    StorageRefused,
    StorageUnavailable,
)
from spotsafe.events import (
    AttemptSuperseded,
    CheckpointPublished,
    CheckpointRetired,
    DeleteRefused,
    Event,
    FileWritten,
    IndexWritten,
    SaveFailed,
    Warned,
)
from spotsafe.policy.retention import best, latest
from spotsafe.storage.store import Store
from spotsafe.testing.faults import CountingStore, FailingStore, LostResponseStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.saves import Attempt, stage, steps_of
from spotsafe.testing.sinks import RecordingSink
from spotsafe.writer.job import SaveResult
from spotsafe.writer.upload import Uploader
from tests.checkpoint.test_attempts import RECORD

NAME = CheckpointName(1, 7, 1, "0123abcd")
ARRAYS = {"a": np.arange(6, dtype=np.float32), "b": np.arange(3, dtype=np.int64)}
NAN = np.array([1, np.nan], dtype=np.float32)


def run_job(job, *, store, arena, emit, monotonic):
    """A single save, by a writer of its own."""
    return Uploader(store, emit=emit, monotonic=monotonic).run(job, arena)


def run(
    store: Store, *, emit: Callable[[Event], object] = lambda event: None, **options: object
) -> SaveResult:
    """Run one job of `ARRAYS` with a clock that stands still."""
    options = {"files": 2, **options}
    save = stage(NAME, options.pop("arrays", ARRAYS), **options)
    return run_job(save.job, store=store, arena=save.arena, emit=emit, monotonic=lambda: 0.0)


def manifest_of(store: Store, name: CheckpointName = NAME) -> Manifest:
    """The published manifest."""
    manifest = read_candidate(store, name).manifest
    assert manifest is not None
    return manifest


def steps(store: Store) -> list[int]:
    """The published steps, oldest first."""
    return steps_of(list(candidates(store, look(store))))[::-1]


def fail_at(
    path: str, error: Exception, *, verb: str | None = None
) -> Callable[[str, str, int], Exception | None]:
    """Fail an operation on paths that contain `path`."""
    return lambda name, where, number: error if path in where and verb in {None, name} else None


# What is written, and in which order


def test_order_of_a_save() -> None:
    """Data files, then the index, then sizes confirmed, then the manifest; only then is anything listed."""
    store = CountingStore(MemoryStore())
    assert run(store).published
    made = [(operation.name, operation.path.rpartition("/")[2]) for operation in store.operations]
    assert made[:10] == [
        ("put_large", "data-00000-000.safetensors"),
        ("put_large", "data-00000-001.safetensors"),
        ("put", "index-00000.json"),
        ("size", "data-00000-000.safetensors"),
        ("size", "data-00000-001.safetensors"),
        ("size", "index-00000.json"),
        ("read", "000002.json"),
        ("create", "manifest.json"),
        ("create", "000001.published"),
        ("read", "000002.json"),
    ]
    assert {verb for verb, _ in made[10:]} == {"begun", "list"}


def test_files_are_the_staged_bytes() -> None:
    """Each data file is a safetensors file with the staged arrays, and the whole checkpoint verifies."""
    store = MemoryStore()
    result = run(store)
    loaded = {}
    for number in (0, 1):
        loaded.update(load(store.objects[NAME.file(data_file(0, number))]))
    assert all(np.array_equal(loaded[key], array) for key, array in ARRAYS.items())
    assert verify(store, NAME) == []
    assert result.total_bytes == manifest_of(store).total_bytes


def test_manifest_says_what_the_job_said() -> None:
    """Identity, parent, metrics, reason and time go into the manifest; state and session into the index."""
    store = MemoryStore()
    parent = "a000001-s000000001-0001-00000000"
    run(store, metrics={"loss": 0.5, "bad": float("nan")}, parent=parent)
    manifest = manifest_of(store)
    assert manifest.name == NAME
    assert (manifest.parent, manifest.reason, manifest.world_size) == (parent, "interval", 1)
    assert manifest.metrics["loss"] == 0.5
    assert np.isnan(manifest.metrics["bad"])
    index = read_index(store, read_candidate(store, NAME), manifest.parts[0])
    assert index.session == {"step": 7}
    assert {tensor.name for tensor in index.tensors} == {"a", "b"}


def test_events_of_a_save() -> None:
    """Each thing that becomes durable is told once, in order."""
    sink = RecordingSink()
    result = run(MemoryStore(), emit=sink.emit)
    assert [type(event) for event in sink.events] == [
        FileWritten,
        FileWritten,
        IndexWritten,
        CheckpointPublished,
    ]
    published = sink.of(CheckpointPublished)[0]
    assert (published.checkpoint, published.step, published.healthy) == (str(NAME), 7, True)
    assert (
        published.total_bytes
        == result.total_bytes
        == sum(event.total_bytes for event in sink.of(FileWritten))
    )


def test_time_of_a_save_ends_with_the_publish() -> None:
    """Cleaning up is not part of what a save costs."""
    times = iter([10.0, 12.5, 99.0])
    save = stage(NAME, ARRAYS)
    result = run_job(
        save.job,
        store=MemoryStore(),
        arena=save.arena,
        emit=lambda event: None,
        monotonic=lambda: next(times),
    )
    assert result.write_s == 2.5


def test_a_save_without_tensors() -> None:
    """A run without state saves its position alone."""
    store = MemoryStore()
    save = stage(NAME, {}, files=0)
    result = run_job(save.job, store=store, arena=save.arena, emit=lambda event: None, monotonic=lambda: 0.0)
    assert result.published
    assert verify(store, NAME) == []


def test_second_save_needs_no_mark_and_no_sweep() -> None:
    """What is done once per attempt is not done again."""
    store = CountingStore(MemoryStore())
    attempt = Attempt(store)
    attempt.save(1)
    store.operations.clear()
    assert attempt.save(2).published
    assert attempt_published(1) not in [operation.path for operation in store.operations]
    assert store.count("list") == 1
    assert store.count("read") == 2  # the two looks; its own manifest it knows


# Health


def test_unhealthy_save_is_published_and_marked() -> None:
    """NaN does not stop a save; the manifest says so, with the names."""
    store = MemoryStore()
    sink = RecordingSink()
    result = run(store, arrays={"w": NAN, "v": ARRAYS["a"]}, emit=sink.emit)
    assert result.published
    assert not result.healthy
    assert not sink.of(CheckpointPublished)[0].healthy
    health = manifest_of(store).health
    assert (health.healthy, health.nonfinite, health.nonfinite_buffers) == (False, ("w",), ())


def test_moments_count_and_buffers_do_not() -> None:
    """A nonfinite optimizer moment is unhealthy; a nonfinite buffer is only reported."""
    store = MemoryStore()
    assert not run(store, arrays={"m": NAN}, roles={"m": "moment"}, files=1).healthy
    store = MemoryStore()
    assert run(store, arrays={"b": NAN}, roles={"b": "buffer"}, files=1).healthy
    assert manifest_of(store).health.nonfinite_buffers == ("b",)


def test_what_was_nonfinite_before_is_healthy() -> None:
    """A parameter that held NaN where the attempt began is listed, and does not make the save unhealthy."""
    store = MemoryStore()
    result = run(store, arrays={"w": NAN}, files=1, nonfinite_before=frozenset({"w"}))
    assert result.healthy
    assert manifest_of(store).health.nonfinite == ("w",)


# Superseded


def claim_at(inner: MemoryStore, verb: str, where: str) -> FailingStore:
    """A store in which attempt 2 appears right before an operation."""

    def act(name: str, path: str, number: int) -> None:
        if name == verb and path.endswith(where):
            inner.objects.setdefault(attempt_record(2), encode_record(RECORD))

    return FailingStore(inner, fail=act)


@pytest.mark.parametrize(
    ("verb", "where"),
    [
        pytest.param("put", index_file(0), id="before the look"),
        pytest.param("create", "manifest.json", id="between look and creation"),
        pytest.param("create", ".published", id="after the creation"),
    ],
)
def test_superseded_attempt_publishes_and_deletes_nothing(verb: str, where: str) -> None:
    """Wherever the newer attempt appears, the save is published, and not one object is deleted or replaced."""
    inner = MemoryStore()
    attempt = Attempt(inner, keep=latest(1000))
    for step in (1, 2, 3):
        attempt.save(step)
    before = dict(inner.objects)
    sink = RecordingSink()
    store = claim_at(inner, verb, where)
    uploader = Uploader(store, emit=sink.emit, monotonic=lambda: 0.0)
    save = stage(CheckpointName(1, 4, 4, attempt.record.nonce), ARRAYS, keep=latest(1))
    result = uploader.run(save.job, save.arena)
    assert (result.published, result.superseded_by, result.error) == (True, 2, None)
    assert before.items() <= inner.objects.items()
    assert sink.of(AttemptSuperseded) == [AttemptSuperseded(attempt=1, newer=2)]
    assert steps(inner) == [1, 2, 3, 4]


@pytest.mark.parametrize("newer_is_there", [True, False])
def test_a_save_whose_file_is_taken_from_it(*, newer_is_there: bool) -> None:
    """By the sweep of a newer attempt: it is superseded, which no restart may answer. By nobody: the save failed."""
    inner, sink = MemoryStore(), RecordingSink()
    zombie = Attempt(inner)
    zombie.save(1)

    class Sweeping(RecordingSink):
        def emit(self, event: Event) -> None:
            sink.emit(event)
            if isinstance(event, FileWritten):
                if newer_is_there:
                    Attempt(inner).save(5)
                for path in [path for path in inner.objects if event.checkpoint in path]:
                    inner.delete(path)

    save = stage(CheckpointName(1, 2, 2, zombie.record.nonce), ARRAYS)
    result = Uploader(inner, emit=Sweeping().emit, monotonic=lambda: 0.0).run(save.job, save.arena)
    assert not result.published
    if newer_is_there:
        assert (result.superseded_by, result.error) == (2, None)
        assert sink.of(AttemptSuperseded) == [AttemptSuperseded(attempt=1, newer=2)]
        assert not sink.of(SaveFailed)
        assert steps(inner) == [1, 5]
    else:
        assert result.superseded_by is None
        assert isinstance(result.error, StorageNotFound)
        assert sink.of(SaveFailed)


def test_abandoned_save_is_not_published() -> None:
    """A zombie whose folder was swept by a newer attempt publishes nothing, and learns that it is one."""
    inner = MemoryStore()
    zombie = Attempt(inner)
    zombie.save(1)
    sink = RecordingSink()

    def sweep_now(name: str, path: str, number: int) -> None:
        if name == "read" and path == attempt_record(2) and number > 5:
            Attempt(inner).save(5)

    slow = FailingStore(inner, fail=sweep_now)
    save = stage(CheckpointName(1, 2, 2, zombie.record.nonce), ARRAYS, files=2)
    result = Uploader(slow, emit=sink.emit, monotonic=lambda: 0.0).run(save.job, save.arena)
    assert (result.published, result.superseded_by, result.error) == (False, 2, None)
    assert sink.of(AttemptSuperseded)
    assert not sink.of(SaveFailed)
    assert steps(inner) == [1, 5]


def test_zombie_that_publishes_late_is_not_the_newest() -> None:
    """What a lower attempt publishes after a higher one lived is set aside by the order, however high its step."""
    store = MemoryStore()
    zombie, newer = Attempt(store), Attempt(store)
    newer.save(10)
    result = zombie.save(1_000)
    assert (result.published, result.superseded_by) == (True, 2)
    assert next(candidates(store, look(store))).name.step == 10
    newer.save(11)
    newer.save(12)
    assert steps(store) == [11, 12]  # retention of the newer attempt may withdraw it


# Failures


FAILURES = [
    pytest.param(data_file(0, 0), "put_large", id="first file"),
    pytest.param(data_file(0, 1), "put_large", id="second file"),
    pytest.param(index_file(0), "put", id="index"),
    pytest.param(index_file(0), "size", id="confirmation"),
    pytest.param(attempt_record(2), "read", id="look"),
    pytest.param("manifest.json", "create", id="manifest"),
]
ERRORS = [
    StorageUnavailable("down"),
    StorageRefused("no"),
    StorageError("odd"),
    MemoryError(),
    KeyError("bug"),
]


@pytest.mark.parametrize(("path", "verb"), FAILURES)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_any_failure_before_the_manifest(path: str, verb: str, error: Exception) -> None:
    """Whatever fails, nothing is raised, nothing is published, earlier checkpoints are whole, the next save works."""
    inner = MemoryStore()
    broken = [False]
    sink = RecordingSink()
    failing = fail_at(path, error, verb=verb)
    store = FailingStore(inner, fail=lambda *what: failing(*what) if broken[0] else None)
    attempt = Attempt(store, emit=sink.emit)
    first = attempt.save(1)
    broken[0] = True
    result = attempt.save(2)
    broken[0] = False
    assert not result.published
    assert result.error is error
    assert [event.step for event in sink.of(SaveFailed)] == [2]
    assert steps(inner) == [1]
    assert verify(inner, first.name) == []
    assert attempt.save(3).published
    assert steps(inner) == [1, 3]
    leftovers = [entry.path for entry in inner.list(result.name.folder)]
    assert leftovers in ([], [result.name.manifest])  # a marker stays where the manifest had been tried


@pytest.mark.parametrize("alone", [False, True])
def test_a_manifest_that_may_still_arrive_is_known_until_its_name_is_decided(alone: bool) -> None:
    """By the next save where a store refuses what comes late; else never, and the attempt's end has to say so."""
    failing = fail_at("manifest.json", StorageUnavailable("no answer"), verb="create")
    broken = [True]
    store = FailingStore(MemoryStore(), fail=lambda *what: failing(*what) if broken[0] else None)
    attempt = Attempt(store, ended=(lambda _: False) if alone else None)
    assert not attempt._uploader.undecided
    attempt.save(1)
    assert attempt._uploader.undecided
    broken[0] = False
    attempt.save(2)
    assert attempt._uploader.undecided is alone


def test_a_save_that_failed_before_its_manifest_is_no_such_one() -> None:
    """Nothing of it can come to exist any more."""
    store = FailingStore(MemoryStore(), fail=fail_at("index-00000.json", StorageUnavailable("no answer")))
    attempt = Attempt(store)
    assert not attempt.save(1).published
    assert not attempt._uploader.undecided


@pytest.mark.parametrize("path", [data_file(0, 0), data_file(0, 1), index_file(0), "manifest.json"])
def test_full_disk_in_the_middle(path: str) -> None:
    """No space: no manifest, the space is given back at once, earlier checkpoints are good, training can go on."""
    inner = MemoryStore()
    full = [False]
    refuse = fail_at(path, StorageFull("no space left"))
    store = FailingStore(
        inner,
        fail=lambda name, where, number: (
            refuse(name, where, number) if full[0] and name in {"put", "put_large", "create"} else None
        ),
    )
    attempt = Attempt(store)
    first = attempt.save(1)
    full[0] = True
    result = attempt.save(2)
    assert isinstance(result.error, StorageFull)
    assert not result.published
    assert steps(inner) == [1]
    assert verify(inner, first.name) == []
    if path != "manifest.json":  # there the name has to be decided first, which needs space too
        assert inner.list(result.name.folder) == []
    full[0] = False
    assert attempt.save(3).published
    assert [entry for entry in inner.list(result.name.folder) if "data" in entry.path] == []


def test_full_disk_that_cannot_be_cleaned_yet() -> None:
    """If even the deletion fails, the result is still the full disk, and the space is given back later."""
    inner = MemoryStore()
    broken = [False]
    store = FailingStore(
        inner,
        fail=lambda name, path, number: (
            {"put": StorageFull("full"), "delete": StorageUnavailable("down")}.get(name)
            if broken[0]
            else None
        ),
    )
    attempt = Attempt(store)
    broken[0] = True
    result = attempt.save(1)
    assert isinstance(result.error, StorageFull)
    assert inner.list(result.name.folder)
    broken[0] = False
    assert attempt.save(2).published
    assert inner.list(result.name.folder) == []


def test_unknown_publish_is_settled_later() -> None:
    """If the manifest's creation was lost but had happened, the checkpoint is found by the next save and counts."""
    inner = MemoryStore()
    attempt = Attempt(inner)
    attempt.save(1)
    lossy = LostResponseStore(inner, operations={"create"})
    uploader = Uploader(lossy, emit=lambda event: None, monotonic=lambda: 0.0)
    saves = [stage(CheckpointName(1, step, step, attempt.record.nonce), ARRAYS) for step in (2, 3)]
    lost, settled = (uploader.run(save.job, save.arena) for save in saves)
    assert isinstance(lost.error, StorageUnavailable)
    assert not lost.published
    assert settled.published
    assert steps(inner) == [2, 3]
    assert verify(inner, lost.name) == []


@pytest.mark.parametrize("file", [data_file(0, 1), index_file(0)])
def test_store_that_keeps_less_than_it_says(file: str) -> None:
    """A file that is shorter than what was written is noticed before the manifest."""

    class Short(MemoryStore):
        """Drops the last byte of one file."""

        def put(self, path: str, data: bytes) -> None:
            super().put(path, data[:-1] if path.endswith(file) else data)

    store = Short()
    result = run(store)
    assert isinstance(result.error, StorageError)
    assert file in str(result.error)
    assert NAME.manifest not in store.objects


def test_store_that_keeps_nothing() -> None:
    """A file that is not there after it was written is noticed before the manifest."""

    class Empty(MemoryStore):
        """Forgets every large object."""

        def put_large(self, path: str, data: memoryview) -> None:
            pass

    result = run(Empty())
    assert isinstance(result.error, StorageNotFound)


def test_plan_that_does_not_fit_the_arena() -> None:
    """A job that speaks of memory outside the arena is an error, not a short file."""
    save = stage(NAME, {"i": np.arange(4)}, files=1)
    store = MemoryStore()
    result = run_job(
        save.job, store=store, arena=save.arena[:4096], emit=lambda event: None, monotonic=lambda: 0.0
    )
    assert isinstance(result.error, ValueError)
    assert NAME.manifest not in store.objects


AFTER = [
    pytest.param(".published", "create", id="mark"),
    pytest.param("checkpoints", "list", id="listing"),
    pytest.param("data-", "delete", id="file of a victim"),
    pytest.param("manifest.json", "delete", id="manifest of a victim"),
]


@pytest.mark.parametrize(("path", "verb"), AFTER)
def test_failure_after_the_manifest_is_no_failed_save(path: str, verb: str) -> None:
    """Once published, what fails is a warning: the result says published, and no SaveFailed is told."""
    inner = MemoryStore()
    before = Attempt(inner, keep=latest(1000))
    for step in (1, 2, 3):
        before.save(step)
    inner.delete(attempt_published(1))
    sink = RecordingSink()
    store = FailingStore(inner, fail=fail_at(path, StorageUnavailable("down"), verb=verb))
    save = stage(CheckpointName(1, 4, 4, before.record.nonce), ARRAYS)
    result = Uploader(store, emit=sink.emit, monotonic=lambda: 0.0).run(save.job, save.arena)
    assert result.published
    assert isinstance(result.error, StorageUnavailable)
    assert not sink.of(SaveFailed)
    assert "is published" in sink.of(Warned)[0].message
    assert steps(inner)[-1] == 4


def test_refused_deletes_are_not_even_an_error() -> None:
    """A bucket that lets nothing be deleted: saves go on without an error, each refusal is an event."""
    inner = MemoryStore()
    sink = RecordingSink()
    store = FailingStore(inner, fail=fail_at("", StorageRefused("locked"), verb="delete"))
    attempt = Attempt(store, emit=sink.emit)
    results = [attempt.save(step) for step in (1, 2, 3, 4)]
    assert all(result.published and result.error is None for result in results)
    assert sink.of(DeleteRefused)
    assert not sink.of(CheckpointRetired)
    assert steps(inner) == [1, 2, 3, 4]


def test_what_cannot_be_cleaned_is_told_once() -> None:
    """A bucket that lets nothing be deleted, or listed: not a word at every save, but one again after it went well."""
    for verb, kind in (("delete", DeleteRefused), ("list", Warned)):
        refusing, sink = [True], RecordingSink()
        refuse = fail_at("", StorageRefused("locked"), verb=verb)
        store = FailingStore(
            MemoryStore(), fail=lambda *call, no=refuse, on=refusing: no(*call) if on[0] else None
        )
        attempt = Attempt(store, emit=sink.emit)
        refusing[0] = True
        for step in range(1, 7):
            assert attempt.save(step).published
        told = sink.of(kind)
        assert told
        assert len({event.path if isinstance(event, DeleteRefused) else 0 for event in told}) == len(told), (
            verb
        )
        refusing[0] = False
        attempt.save(7)
        refusing[0] = True
        attempt.save(8)
        assert len(sink.of(kind)) == len(told) + 1, verb


def test_nothing_of_the_arena_is_held_by_a_failure() -> None:
    """The error in a result keeps no memory of the save alive."""

    class Held(bytearray):
        """Memory that can be watched."""

    save = stage(NAME, ARRAYS)
    memory = Held(save.arena)
    watched = weakref.ref(memory)
    store = FailingStore(MemoryStore(), fail=fail_at("data", StorageUnavailable("down")))
    result = run_job(
        save.job, store=store, arena=memoryview(memory), emit=lambda event: None, monotonic=lambda: 0.0
    )
    del memory
    garbage.collect()
    assert result.error is not None
    assert watched() is None


# Retention as a run uses it


def test_best_is_computed_from_manifests() -> None:
    """A new process keeps the best of an earlier one, and gives it up for a better one."""
    store = MemoryStore()
    keep = latest(1) | best("loss", mode="min")
    first = Attempt(store, keep=keep)
    for step, loss in ((1, 0.1), (2, 0.3), (3, 0.4), (4, float("nan"))):
        first.save(step, metrics={"loss": loss})
    assert steps(store) == [1, 3, 4]
    second = Attempt(store, keep=keep)
    for step, loss in ((5, 0.5), (6, 0.05), (7, 0.2)):
        second.save(step, metrics={"loss": loss})
    assert steps(store) == [6, 7]


def test_two_attempts_leave_no_garbage() -> None:
    """After a crash in the middle of a save, the next attempt's first publish clears it away."""
    store = MemoryStore()
    first = Attempt(store)
    first.save(1)
    crashed = CheckpointName(1, 2, 2, first.record.nonce)
    store.put(crashed.file(data_file(0, 0)), b"half")
    second = Attempt(store)
    assert second.save(3).published
    assert [entry.path for entry in store.list(crashed.folder)] == [crashed.manifest]
    assert steps(store) == [1, 3]
