"""Runs in memory, for tests that look at what lies on storage and break it."""

from __future__ import annotations

from typing import Any

import spotsafe
from spotsafe.checkpoint.candidates import Candidate, look, read_candidate
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.manifest import Manifest
from spotsafe.storage.store import Store
from spotsafe.testing.memory import MemoryStore
from tests.session.rig import Program


def train(program: Program, run: spotsafe.Run, until: int = 6, *, wait: bool = True) -> None:
    """Steps up to `until`; each waits for the save of the one before, so that none is skipped."""
    for step, batch in run.steps(program.loader, until=until):
        program.train(step, batch)
        if wait:
            run.wait()


def trained(store: Any, until: int = 4, **options: Any) -> Program:
    """One attempt that trains up to `until`, with a checkpoint every second step unless told otherwise."""
    program = Program()
    with program.session(store, **{"save_every": 2, "keep": 10, **options}) as run:
        train(program, run, until)
    return program


def run_of_two() -> tuple[MemoryStore, CheckpointName, CheckpointName]:
    """A run with two checkpoints, of steps 2 and 4: the store, the older, the newer."""
    store = MemoryStore()
    trained(store)
    newer, older = published(store)
    return store, older, newer


def published(store: Store) -> list[CheckpointName]:
    """The checkpoints that are there, newest first."""
    return [name for name in look(store).names if candidate(store, name).manifest is not None]


def steps_there(store: Store) -> list[int]:
    """Their steps, newest first."""
    return [name.step for name in published(store)]


def candidate(store: Store, name: CheckpointName) -> Candidate:
    """What a reader finds under a checkpoint's name."""
    return read_candidate(store, name)


def manifest_of(store: Store, name: CheckpointName) -> Manifest:
    """The manifest of a checkpoint that is there."""
    found = candidate(store, name).manifest
    assert found is not None
    return found


def manifests(store: Store) -> dict[int, Manifest]:
    """The manifest of each step (the newest of a step), in their order."""
    return {name.step: manifest_of(store, name) for name in reversed(published(store))}


def attempts(store: Store) -> tuple[int, ...]:
    """The attempts that were claimed."""
    return look(store).attempts


def start_fails(store: Any, kind: type[BaseException], **options: Any) -> Any:
    """The error with which a start ends; nothing may have been restored, claimed or changed by it."""
    program = Program()
    before = program.weights()
    objects = dict(store.objects) if isinstance(store, MemoryStore) else None
    try:
        with program.session(store, **options):
            raise AssertionError("it started")
    except kind as error:
        assert program.weights() == before
        if objects is not None:
            assert store.objects == objects
        return error
