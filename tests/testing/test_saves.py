"""Staged saves of arrays are real ones: what they publish can be opened by others."""

from __future__ import annotations

import numpy as np
from safetensors.numpy import load

from spotsafe.checkpoint.catalog import candidates, look
from spotsafe.checkpoint.layout import CheckpointName, data_file
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.saves import Attempt, stage, steps_of

ARRAYS = {"a": np.arange(6, dtype=np.float64).reshape(2, 3), "b": np.array(7, dtype=np.int16)}


def test_staged_files_are_safetensors() -> None:
    """Each staged file lies at a page of the arena and is one that the safetensors package opens."""
    save = stage(CheckpointName(1, 2, 3, "00000000"), ARRAYS, files=2)
    loaded = {}
    for file in save.job.files:
        assert file.arena_offset % 4096 == 0
        loaded.update(load(bytes(save.arena[file.arena_offset : file.arena_offset + file.size])))
    assert loaded.keys() == ARRAYS.keys()
    assert all(np.array_equal(loaded[key], array) for key, array in ARRAYS.items())


def test_attempts_save_and_resume() -> None:
    """An attempt claims, saves, and the next one sees what it saved."""
    store = MemoryStore()
    first = Attempt(store)
    assert first.resumed_from is None
    assert first.save(1, arrays=ARRAYS).published
    assert first.save(2).published
    second = Attempt(store)
    assert second.resumed_from is not None
    assert second.resumed_from.name == first.results[-1].name
    assert second.record.resumed_from == str(first.results[-1].name)
    assert steps_of(list(candidates(store, look(store)))) == [2, 1]
    data = store.objects[first.results[0].name.file(data_file(0, 0))]
    assert np.array_equal(load(data)["a"], ARRAYS["a"])
