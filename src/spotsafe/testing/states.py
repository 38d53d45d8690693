"""Captured state through a real checkpoint and back: what tests of stateful objects need.

::

    tracker = Tracker(warn=print)
    tracker.add("mine", MyState())
    saved = through_checkpoint(tracker.capture())
"""

from __future__ import annotations

from spotsafe.checkpoint.candidates import look
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.policy.retention import latest
from spotsafe.reader import Loaded, choose, load_verified
from spotsafe.storage.store import Store
from spotsafe.tensors.plan import MAX_FILE_BYTES, PlanCache
from spotsafe.tensors.staging import stage
from spotsafe.tensors.tree import Capture, SavedState
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.saves import Attempt
from spotsafe.writer.arena import Arena
from spotsafe.writer.job import SaveJob, SaveResult
from spotsafe.writer.upload import Uploader


def write_checkpoint(
    store: Store, capture: Capture, *, step: int = 1, max_file_bytes: int = MAX_FILE_BYTES
) -> SaveResult:
    """Claim an attempt and publish `capture` as its first checkpoint."""
    record = Attempt(store).record
    plan = PlanCache(max_file_bytes=max_file_bytes).plan(capture.tensors)
    arena = Arena(max(plan.arena_size, 1))
    stage(plan, capture, arena.view)
    job = SaveJob(
        name=CheckpointName(record.attempt, step, 1, record.nonce),
        run=record.run,
        parent=None,
        reason="asked",
        created=1_700_000_000.0,
        world_size=1,
        rank=0,
        metrics={},
        files=plan.files,
        tensors=plan.tensors,
        state=capture.state,
        session=capture.session,
        health=plan.health,
        nonfinite_before=frozenset(),
        keep=latest(100),
        resumed_from=None,
    )
    result = Uploader(store, emit=lambda _: None, monotonic=lambda: 0.0).run(job, arena.view)
    if result.error is not None:
        raise result.error
    return result


def read_newest(store: Store) -> Loaded:
    """The checkpoint that a start would resume from, verified."""
    choice = choose(store, look(store))
    assert choice is not None, "there is no checkpoint"
    return load_verified(store, choice.candidate)


def through_checkpoint(capture: Capture, *, max_file_bytes: int = MAX_FILE_BYTES) -> SavedState:
    """What a resume finds of `capture`: planned, staged, written, published, read and verified."""
    store = MemoryStore()
    write_checkpoint(store, capture, max_file_bytes=max_file_bytes)
    return read_newest(store).saved
