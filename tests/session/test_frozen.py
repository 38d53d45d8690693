"""Frozen tensors in a session: written once, referred to from then on, and exact whatever happens to them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

import spotsafe
from spotsafe import events as ev
from spotsafe.checkpoint.candidates import candidates, look, read_candidate
from spotsafe.checkpoint.layout import CheckpointName, frozen_file
from spotsafe.checkpoint.verify import verify
from spotsafe.errors import SaveFailed
from spotsafe.storage.store import Store
from spotsafe.storage.wrapping import Operation, WrappingStore
from spotsafe.tensors.frozen import RECHECK
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.sinks import RecordingSink
from tests.session.rig import MANY_STARTS

FROZEN = frozen_file(0, 0)


class Adapted(torch.nn.Module):
    """A large frozen part, a large buffer that nobody writes, and a small trainable part: 1 % of the whole."""

    table: torch.Tensor

    def __init__(self, width: int = 600, out: int = 3) -> None:
        super().__init__()
        self.width = width
        self.base = torch.nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.register_buffer("table", torch.randn(width, width))
        self.head = torch.nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x) @ self.table)


class Bytes(WrappingStore):
    """Counts the bytes of data files that are written."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.written: list[tuple[str, int]] = []

    def put_large(self, path: str, data: memoryview) -> None:
        self.written.append((path, len(data)))
        super().put_large(path, data)


class Job:
    """A program around such a model; each step trains the head."""

    def __init__(
        self, store: Any, *, model: torch.nn.Module | None = None, lr: float = 0.01, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = model or Adapted()
        trainable = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.SGD(trainable, lr=lr)
        self.sink = RecordingSink()
        self.session = spotsafe.session(
            store,
            model=self.model,
            optimizer=self.optimizer,
            **{"save_every": 1, "watch": None, "events": self.sink, "restart_limits": MANY_STARTS, **options},
        )

    def run(self, steps: int, *, each: Callable[[int], object] = lambda _: None) -> Job:
        with self.session as run:
            for step in run.range(run.step + steps):
                self.model(torch.randn(2, getattr(self.model, "width", 600))).sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                each(step)
                with suppress(SaveFailed):
                    run.wait()
        return self

    def of(self, kind: type[ev.Event]) -> list[Any]:
        return [event for event in self.sink.events if isinstance(event, kind)]

    @property
    def values(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def newest(store: Store) -> CheckpointName:
    name = next(candidates(store, look(store))).name
    assert verify(store, name) == []
    return name


def owners(store: Store) -> list[str]:
    """Whom the newest checkpoint refers to, file by file."""
    manifest = read_candidate(store, newest(store)).manifest
    assert manifest is not None
    return [one.checkpoint for one in manifest.references]


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_the_second_save_stages_and_writes_the_trainable_state_alone() -> None:
    """At most 1.1 times what is trainable, by the bytes of the copy and by those that reach the store."""
    store = Bytes(MemoryStore())
    job = Job(store, model=Adapted(2000, 38), lr=1e-4).run(4)
    trainable = sum(one.nbytes for one in job.model.head.parameters())
    everything = sum(one.nbytes for one in job.values.values())
    assert trainable < everything / 100
    staged = [event.total_bytes for event in job.of(ev.SaveStaged)]
    assert staged[0] >= everything
    names = [event.checkpoint for event in job.of(ev.CheckpointPublished)]
    by_save = [sum(size for path, size in store.written if name in path) for name in names]
    assert by_save[0] >= everything
    assert max(staged[1:]) <= 1.1 * trainable
    assert max(by_save[1:]) <= 1.1 * trainable
    assert len(names) == 4


def test_a_resume_stages_once_and_writes_nothing_again() -> None:
    """The digests of the live tensors are those of the file: an earlier attempt's file serves on."""
    store = Bytes(MemoryStore())
    before = Job(store, keep=1).run(3)
    [owner] = set(owners(store))
    count = len(store.written)
    after = Job(store, keep=1, model=Adapted()).run(3)
    assert not same(before.values, after.values)
    assert torch.equal(before.model.base.weight, after.model.base.weight)
    assert set(owners(store)) == {owner}
    assert not any("frozen" in path for path, _ in store.written[count:])
    assert owner.startswith("a000001-s000000001-")
    third = Job(store, model=Adapted())
    with third.session:
        assert same(third.values, after.values)


def test_unfrozen_and_frozen_again() -> None:
    """What gets a gradient is saved at each save; frozen again, it is referred to again. Every save loads exactly."""
    store = MemoryStore()
    job = Job(store, keep=100)
    job.optimizer.add_param_group({"params": [], "lr": 0.1})
    seen: dict[int, dict[str, torch.Tensor]] = {}
    lent: dict[int, int] = {}

    def each(step: int) -> None:
        if step == 3:
            job.model.base.weight.requires_grad_(True)
            job.optimizer.param_groups[1]["params"].append(job.model.base.weight)
        if step == 6:
            job.model.base.weight.requires_grad_(False)
            job.optimizer.param_groups[1]["params"].clear()
            job.optimizer.state.clear()
        seen[step + 1] = job.values

    job.run(10, each=each)
    for name in [one.name for one in candidates(store, look(store))]:
        assert verify(store, name) == []
        loaded = spotsafe.load(store, "model.*") if name == newest(store) else None
        manifest = read_candidate(store, name).manifest
        assert manifest is not None
        lent[name.step] = sum(one.size for one in manifest.references)
        if loaded is not None:
            state = {key.removeprefix("model."): value for key, value in loaded.items()}
            assert same(state, seen[name.step])
    weight = job.model.base.weight.nbytes
    assert not torch.equal(seen[3]["base.weight"], seen[6]["base.weight"])
    assert lent[3] > 2 * weight
    assert lent[6] < 2 * weight
    assert lent[10] >= lent[6]


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.base.weight.mul_(1.5)


def replaced(model: Any) -> None:
    model.base.weight = torch.nn.Parameter(torch.randn(600, 600), requires_grad=False)


def data_in_place(model: Any) -> None:
    model.base.weight.data.mul_(0.99).add_(0.01)


def data_replaced(model: Any) -> None:
    model.base.weight.data = model.base.weight.data * 0.9


def one_item(model: Any) -> None:
    with torch.no_grad():
        model.base.weight[17, 23] += 1


def buffer(model: Any) -> None:
    model.table.copy_(torch.randn(600, 600))


@pytest.mark.parametrize("change", [in_place, replaced, data_in_place, data_replaced, one_item, buffer])
def test_what_is_changed_is_saved_at_once(change: Callable[[Any], None]) -> None:
    """However a frozen tensor is written, the next save has it; from then on it is saved like any other."""
    store = MemoryStore()
    job = Job(store, keep=100)

    def each(step: int) -> None:
        if step in {2, 5}:
            change(job.model)
        values.append(job.values)

    values: list[dict[str, torch.Tensor]] = []
    job.run(8, each=each)
    steps = {one.name.step: one.name for one in candidates(store, look(store))}
    assert not same(values[1], values[2])
    for step, name in steps.items():
        loaded = spotsafe.load(_only(store, name), "model.*")
        state = {key.removeprefix("model."): value for key, value in loaded.items()}
        assert same(state, values[step - 1]), step
    staged = [event.total_bytes for event in job.of(ev.SaveStaged)]
    assert staged[7] < staged[0] * 0.6, "the other one is still frozen"


def _only(store: MemoryStore, name: CheckpointName) -> MemoryStore:
    """A copy of the run in which this checkpoint is the newest."""
    copy = store.copy()
    for path in list(copy.objects):
        if path.startswith("checkpoints/") and CheckpointName.parse(path.split("/")[1]) > name:  # type: ignore[operator] # its own names
            del copy.objects[path]
    return copy


@pytest.mark.slow
def test_a_hidden_change_of_one_item_is_found_at_the_next_full_comparison() -> None:
    """Through .data and of a single item: nothing cheap shows it. At the 20th save it is saved, and said."""
    store = MemoryStore()
    job = Job(store)

    def each(step: int) -> None:
        if step == 2:
            job.model.base.weight.data[17, 23] += 1
        if step == RECHECK:
            assert not [one for one in job.of(ev.Warned) if ".data" in one.message]

    job.run(RECHECK + 3, each=each)
    [warning] = [one for one in job.of(ev.Warned) if ".data" in one.message]
    assert FROZEN in warning.message
    loaded = spotsafe.load(store, "model.base.weight")
    assert torch.equal(loaded["model.base.weight"], job.model.base.weight)


class Dropping(WrappingStore):
    """Loses one file at a chosen moment, as a person or a life-cycle rule might."""

    drop = False

    def around(self, operation: Operation, call: Callable[[], Any]) -> Any:
        if self.drop:
            self.drop = False
            for entry in self.inner.list("checkpoints"):
                if entry.path.endswith(FROZEN):
                    self.inner.delete(entry.path)
        return call()


def test_a_file_that_vanished_is_written_anew_at_once() -> None:
    """The save that would have referred to it fails; the next safe point makes a whole one, whatever the interval."""
    store = Dropping(MemoryStore())
    job = Job(store, save_every=3)

    def each(step: int) -> None:
        store.drop = store.drop or step == 4

    job.run(8, each=each)
    assert [one.step for one in job.of(ev.SaveFailed)] == [6]
    assert [one.step for one in job.of(ev.CheckpointPublished)] == [3, 7, 8]
    assert verify(store, newest(store)) == []
    with Job(store, model=Adapted()).session as run:
        assert run.step == 8


def test_nothing_frozen_costs_nothing() -> None:
    """A model without frozen parts has no file of that kind, and its checkpoints require nothing."""
    store = MemoryStore()
    model = torch.nn.Sequential(torch.nn.Linear(600, 4), torch.nn.BatchNorm1d(4))
    Job(store, model=model).run(2)
    manifest = read_candidate(store, newest(store)).manifest
    assert manifest is not None
    assert manifest.references == ()
    assert not any("frozen" in path for path in store.objects)
