"""Which tensors are frozen, what a change of them is, and when they are staged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from spotsafe.checkpoint.digest import block_digests
from spotsafe.checkpoint.index_values import FileEntry
from spotsafe.checkpoint.layout import CheckpointName, frozen_file
from spotsafe.tensors.frozen import BUFFER_BYTES, PARAMETER_BYTES, RECHECK, FrozenTensors, StagedFrozen
from spotsafe.tensors.tree import Capture
from spotsafe.tracking import Tracker
from spotsafe.writer.arena import Arena
from spotsafe.writer.job import SaveResult
from spotsafe.writer.lending import RENEW_S, HeldFiles

WIDE = PARAMETER_BYTES // 4 // 64


def frozen_of(**tracked: Any) -> set[str]:
    """What a capture calls frozen."""
    tracker = Tracker(warn=print)
    for name, obj in tracked.items():
        tracker.add(name, obj)
    return set(tracker.capture().frozen)


def linear(*, grad: bool = False) -> nn.Linear:
    """Its weight is just large enough, its bias is not."""
    return nn.Linear(64, WIDE).requires_grad_(grad)


def test_parameters_without_gradient_in_no_optimizer() -> None:
    """Not those that train, nor small ones, nor those that an optimizer holds although they have no gradient now."""
    model = nn.ModuleDict({"a": linear(), "b": linear(grad=True), "c": linear(), "d": nn.Linear(63, WIDE)})
    model["d"].requires_grad_(False)
    optimizer = torch.optim.SGD([*model["b"].parameters(), model["c"].weight], lr=0.1)
    assert frozen_of(model=model, optimizer=optimizer) == {"model.a.weight"}
    assert frozen_of(optimizer=optimizer, model=model) == {"model.a.weight"}


def test_tied_to_what_trains_is_not_frozen() -> None:
    """One tensor, one role: the one that trains."""
    model = nn.ModuleDict({"a": linear(), "b": linear(grad=True)})
    model["a"].weight = model["b"].weight
    assert frozen_of(model=model) == set()
    shared = linear()
    assert frozen_of(one=shared, two=nn.Sequential(shared)) == {"one.weight"}


def test_large_buffers_of_modules_only() -> None:
    """Statistics are small; a bare tensor, an array or a state of the user's may change in ways of its own."""
    model = nn.BatchNorm1d(3)
    model.register_buffer("large", torch.zeros(BUFFER_BYTES // 4))
    model.register_buffer("small", torch.zeros(BUFFER_BYTES // 4 - 1))
    model.register_buffer("gone", torch.zeros(BUFFER_BYTES), persistent=False)
    assert frozen_of(model=model, loose=torch.zeros(BUFFER_BYTES)) == {"model.large"}


class Saves:
    """Saves of a module's frozen tensors, with a writer that answers at once."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told: list[str] = []
        self.model = nn.Sequential(linear(), linear(), linear(grad=True))
        self.tracker = Tracker(warn=print)
        self.tracker.add("model", self.model)
        self.held = HeldFiles(lambda: self.now)
        self.frozen = FrozenTensors(self.held, rank=0, warn=self.told.append)
        self.count = 0

    def split(self) -> tuple[Capture, set[str]]:
        capture, frozen = self.frozen.split(self.tracker.capture())
        names = {one.name for one in frozen}
        assert names.isdisjoint(one.name for one in capture.tensors)
        self.idle = frozen
        return capture, names

    def save(self, *, published: bool = True) -> StagedFrozen:
        self.split()
        self.count += 1
        name = CheckpointName(1, self.count, self.count, "00000000")
        staged = self.frozen.stage(self.idle, save=name)
        entries = []
        for file in staged.files:
            if staged.arena is None:
                assert file.held is not None
                digests = file.held.digests
            else:
                assert file.arena_offset is not None
                digests = block_digests(staged.arena.view[file.arena_offset : file.arena_offset + file.size])
            owner = file.held.checkpoint if file.held is not None and file.held.digests == digests else None
            entries.append(FileEntry(name=file.name, size=file.size, digests=digests, checkpoint=owner))
        result = SaveResult(name=name, published=published, healthy=True, total_bytes=0, write_s=0.0)
        self.frozen.take(replace(result, frozen=tuple(entries)))
        return staged


def test_staged_once() -> None:
    """With the first save; later ones name the file and carry no bytes."""
    saves = Saves()
    first = saves.save()
    assert first.arena is not None
    assert [file.name for file in first.files] == [frozen_file(0, 0)]
    assert first.staged_bytes == sum(file.size for file in first.files) > 2 * PARAMETER_BYTES
    assert {one.name for one in first.tensors} == {"model.0.weight", "model.1.weight"}
    for _ in range(RECHECK - 1):
        later = saves.save()
        assert later.arena is None
        assert later.staged_bytes == 0
        assert [(file.name, file.arena_offset) for file in later.files] == [(frozen_file(0, 0), None)]
        assert later.tensors == first.tensors


def test_staged_again_to_be_compared_when_old_and_after_a_failure() -> None:
    """At every 20th save, after a day of run time, and when nobody knows what became of the save before."""
    saves = Saves()
    saves.save()
    staged = [saves.save().arena is not None for _ in range(2 * RECHECK)]
    assert [number for number, one in enumerate(staged) if one] == [RECHECK - 1, 2 * RECHECK - 1]
    saves.now = RENEW_S
    renewed = saves.save()
    assert renewed.arena is not None
    assert renewed.files[0].held is None
    assert saves.save(published=False).arena is None
    assert saves.save().arena is not None
    assert saves.save().arena is None
    assert saves.told == []


def test_what_is_known_needs_no_memory_to_be_looked_at_again() -> None:
    """Where there is none it is put off to the next save; what has to be staged does need it."""
    saves, full = Saves(), [False]

    def arena(size: int) -> Arena:
        if full[0]:
            raise MemoryError(f"no {size} bytes")
        return Arena(size)

    saves.frozen = FrozenTensors(saves.held, rank=0, warn=saves.told.append, arena=arena)
    full[0] = True
    with pytest.raises(MemoryError):
        saves.save()
    assert not saves.frozen.awaits_result
    full[0] = False
    saves.save()
    full[0] = True
    assert [saves.save().arena for _ in range(RECHECK + 1)] == [None] * (RECHECK + 1)
    full[0] = False
    assert saves.save().arena is not None


def write(model: Any) -> None:
    with torch.no_grad():
        model[0].weight[3, 4] = 7.0


def overwrite_data(model: Any) -> None:
    model[0].weight.data.mul_(2.0)


def exchange(model: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone(), requires_grad=False)


@pytest.mark.parametrize("change", [write, overwrite_data, exchange])
def test_what_has_changed_is_frozen_no_more(change: Callable[[Any], None]) -> None:
    """The others stay frozen; their file is made anew without it, once."""
    saves = Saves()
    saves.save()
    change(saves.model)
    staged = saves.save()
    assert {one.name for one in staged.tensors} == {"model.1.weight"}
    assert staged.arena is not None
    assert "model.0.weight" in {one.name for one in saves.split()[0].tensors}
    assert saves.save().arena is None


def test_a_hidden_change_is_found_by_digests_and_told() -> None:
    """One item through .data between two saves: nothing cheap shows it, the next comparison does."""
    saves = Saves()
    saves.save()
    saves.model[0].weight.data[3, 4] += 1
    for _ in range(RECHECK - 1):
        assert saves.save().arena is None
    assert saves.told == []
    assert saves.save().arena is not None
    assert len(saves.told) == 1
    assert ".data" in saves.told[0]


def test_nothing_frozen() -> None:
    """No file, no memory."""
    saves = Saves()
    saves.model.requires_grad_(True)
    staged: Mapping[str, Any] = {"files": (), "tensors": (), "arena": None}
    assert {name: getattr(saves.save(), name) for name in staged} == staged
