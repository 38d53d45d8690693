"""`spotsafe.load`: a part of a checkpoint without its program, verified, and without leaving a trace."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import spotsafe
from spotsafe.checkpoint.candidates import look
from spotsafe.checkpoint.catalog import resolve
from spotsafe.checkpoint.cleaning import Cleaning
from spotsafe.checkpoint.gc import anything
from spotsafe.errors import CheckpointNotFound, DamagedCheckpoint, StateMismatch, StorageNotFound
from spotsafe.storage.open import open_store
from spotsafe.storage.store import Store
from spotsafe.tensors import filling
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.saves import Attempt
from spotsafe.testing.states import write_checkpoint
from spotsafe.tracking import Tracker
from tests.session.rig import Program


class Color(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int


class Holder:
    """State of the user's own."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def saved(store: Store | None = None, *, max_file_bytes: int = 1 << 20, **tracked: Any) -> Store:
    """A run with one checkpoint of these objects."""
    store = store or MemoryStore()
    tracker = Tracker(warn=print)
    for name, obj in tracked.items():
        tracker.add(name, obj)
    capture = tracker.capture(session={"values": {"note": "hello"}})
    write_checkpoint(store, capture, max_file_bytes=max_file_bytes)
    return store


def test_a_part_of_a_real_run(tmp_path):
    """Names and patterns choose; what is loaded is what the program had."""
    program = Program()
    with program.session(tmp_path / "run") as run:
        for step, batch in run.steps(program.loader, until=3):
            program.train(step, batch)

    weights = spotsafe.load(tmp_path / "run", "model.*")
    some = spotsafe.load(
        f"{tmp_path / 'run'}@3", ["scheduler.last_epoch", "optimizer.*.exp_avg", "run.values"]
    )

    assert weights.keys() == {f"model.{key}" for key in program.model.state_dict()}
    fresh = Program(seed=1)
    fresh.model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
    assert fresh.weights() == program.weights()
    assert some["scheduler.last_epoch"] == 3
    assert some["run.values"] == {}
    moments = program.optimizer.state[program.model.first.weight]
    assert torch.equal(some["optimizer.model.first.weight.exp_avg"], moments["exp_avg"])
    assert len(some) == 6


def test_everything_is_the_default():
    """Without names all there is comes, with the types it had."""
    store = saved(
        net=torch.nn.Linear(2, 3), ema=torch.ones(2, dtype=torch.bfloat16), table=np.arange(4, dtype="<u2"),
        own=Holder(epoch=3, pair=(1, torch.zeros(2)), size=torch.Size([1, 2])),
    )  # fmt: skip

    held = spotsafe.load(store)

    assert list(held) == [
        "net.weight",
        "net.bias",
        "ema",
        "table",
        "own.epoch",
        "own.pair",
        "own.size",
        "run.values",
    ]
    assert held["ema"].dtype is torch.bfloat16
    assert isinstance(held["table"], np.ndarray)
    assert held["table"].tolist() == [0, 1, 2, 3]
    assert (held["own.epoch"], held["own.pair"][0], held["own.size"]) == (3, 1, torch.Size([1, 2]))
    assert held["run.values"] == {"note": "hello"}


def test_a_tied_weight_is_one_tensor():
    """It has all its names, and stays one object."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    net[1].weight = net[0].weight

    held = spotsafe.load(saved(net=net), "net.*.weight")

    assert held["net.0.weight"] is held["net.1.weight"]


def test_a_tensor_inside_a_value_can_be_had_alone():
    """Under the name that `spotsafe show` prints for it."""
    store = saved(own=Holder(history=[torch.ones(3), torch.zeros(1)]))

    assert list(spotsafe.load(store, "own.history[1]")) == ["own.history[1]"]


def test_tensors_that_were_cut_are_put_together():
    """Along any dimension, over several files."""
    tensor = torch.arange(2 * 3 * 50, dtype=torch.int64).reshape(2, 3, 50)

    for limit in (64, 200, 500, 1000):
        held = spotsafe.load(saved(t=tensor, max_file_bytes=limit), "t")
        assert torch.equal(held["t"], tensor), limit


def test_dtypes_that_numpy_lacks_come_as_they_were():
    """Bytes are bytes, whatever the dtype."""
    kinds = [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.uint16]
    tensors = {f"t{at}": torch.ones(3, 2).to(kind) for at, kind in enumerate(kinds)}
    tensors["empty"], tensors["scalar"] = torch.empty(0, 4), torch.tensor(3.5)

    held = spotsafe.load(saved(**tensors), [*tensors])

    for name, tensor in tensors.items():
        assert (held[name].dtype, held[name].shape) == (tensor.dtype, tensor.shape)
        assert (
            held[name].view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()
            if tensor.ndim
            else True
        )
    assert held["scalar"].item() == 3.5


def test_sparse_tensors():
    """Made of their parts again."""
    sparse = torch.eye(3).to_sparse_coo()

    held = spotsafe.load(saved(own=Holder(s=sparse)), "own.s")

    assert torch.equal(held["own.s"].to_dense(), torch.eye(3))


def test_classes_that_only_the_program_has_are_not_imported():
    """Of an Enum or a dataclass come name and fields: nothing is imported because a file says so."""
    held = spotsafe.load(saved(own=Holder(color=Color.RED, point=Point(3))))

    assert (held["own.color"].class_name.rpartition(":")[2], held["own.color"].value) == ("Color", "RED")
    assert held["own.point"].value == {"x": 3}


def test_nothing_is_written_and_nothing_claimed(tmp_path):
    """The folder is afterwards byte for byte what it was; it can even be read-only."""
    saved(open_store(str(tmp_path)), t=torch.ones(2))

    def snapshot() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    before = snapshot()
    spotsafe.load(str(tmp_path))

    assert snapshot() == before


class Watched(MemoryStore):
    """Counts the bytes of data files that are read, and can do something before one of them is."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_read = 0
        self.before: Callable[[], None] | None = None

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        before, self.before = self.before, None
        if before is not None:
            before()
        self.bytes_read += len(buffer)
        super().read_into(path, offset, buffer)


def test_only_what_is_needed_is_read():
    """One file of many for one tensor; no data at all for plain values."""
    store = Watched()
    saved(
        store,
        max_file_bytes=20_000,
        **{f"t{at}": torch.full((4000,), at) for at in range(5)},
        own=Holder(n=1),
    )

    spotsafe.load(store, "own.n")
    assert store.bytes_read == 0
    spotsafe.load(store, "t3")
    assert 32_000 <= store.bytes_read < 60_000


def test_every_byte_that_is_returned_was_verified():
    """Each single flipped bit of the tensor's bytes is found; damage elsewhere in other files is not looked for."""
    store = MemoryStore()
    saved(store, max_file_bytes=40, a=torch.ones(8), b=torch.zeros(8))
    name = resolve(store).name
    path = name.file("data-00000-000.safetensors")
    data = store.read(path, max_bytes=1 << 20)
    for at in range(4096, len(data)):
        store.replace(path, data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(DamagedCheckpoint, match="data-00000-000"):
            spotsafe.load(store, "a")
    assert torch.equal(spotsafe.load(store, "b")["b"], torch.zeros(8))


def test_a_damaged_newest_is_an_error_and_no_older_one_is_taken():
    """Who asks for values wants those or none; the error names the file."""
    store = MemoryStore()
    attempt = Attempt(store)
    attempt.save(1)
    attempt.save(2)
    index = resolve(store).name.file("index-00000.json")
    store.replace(index, store.read(index, max_bytes=1 << 20)[:-1] + b" ")

    with pytest.raises(DamagedCheckpoint, match=r"index-00000\.json"):
        spotsafe.load(store)


def retire_newest(store: MemoryStore) -> None:
    name = look(store).names[0]
    for path in [name.manifest, *(entry.path for entry in store.list(name.folder))]:
        store.delete(path)


def two_saves() -> Watched:
    store = Watched()
    attempt = Attempt(store)
    attempt.save(1)
    attempt.save(2)
    return store


def test_a_checkpoint_that_is_retired_while_it_is_read_is_exchanged_for_the_newest():
    """If the newest was asked for, the one that is newest now is as good."""
    store = two_saves()
    store.before = lambda: retire_newest(store)

    assert spotsafe.load(store, "weight0")["weight0"][0].item() == 1.0


def test_a_named_one_that_is_retired_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    """Step 2 was asked for and nothing else will do; the error says what happened."""
    attempt = Attempt(open_store(str(tmp_path)))
    attempt.save(1)
    attempt.save(2)
    store = open_store(str(tmp_path))
    name = look(store).names[0]
    os.remove(tmp_path / name.file("data-00000-001.safetensors"))
    with pytest.raises(DamagedCheckpoint, match=r"data-00000-001\.safetensors: is missing"):
        spotsafe.load(f"{tmp_path}@2", "weight1")

    real = filling.read_ranges

    def read(*arguments: Any, **options: Any) -> None:
        cleaning = Cleaning(store=store, attempt=1, on_event=print, known={}, may_delete=anything, now=0.0)
        assert cleaning.look()
        cleaning.retire([name])
        real(*arguments, **options)

    monkeypatch.setattr(filling, "read_ranges", read)
    with pytest.raises(CheckpointNotFound, match="was deleted while it was read"):
        spotsafe.load(f"{tmp_path}@2", "weight0")


def test_a_run_whose_checkpoints_all_vanish_ends_in_an_error():
    """Not in an endless loop."""
    store = two_saves()

    def vanish(path: str, offset: int, buffer: memoryview) -> None:
        retire_newest(store)
        raise StorageNotFound("gone", path=path)

    store.read_into = vanish  # type: ignore[method-assign]

    with pytest.raises(CheckpointNotFound, match=r"ever published|none at all"):
        spotsafe.load(store, "weight0")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("net", r"did you mean 'net\.\*'"),
        ("net.wieght", r"nearest: 'net\.weight'"),
        ("nothing.like.it", r"nearest: 'net\.weight'"),
        ("opt.*", r"opt\.\*"),
    ],
)
def test_a_name_that_is_not_there(name, hint):
    """The error says which name, and what may have been meant."""
    with pytest.raises(StateMismatch, match=hint) as caught:
        spotsafe.load(saved(net=torch.nn.Linear(2, 3)), ["net.bias", name])

    assert len(caught.value.problems) == 1
    assert isinstance(caught.value, ValueError)


def test_no_names_is_nothing():
    """An empty list asks for nothing, which is not the same as asking for all."""
    assert spotsafe.load(saved(t=torch.ones(1)), []) == {}


def test_a_run_that_is_not_there(tmp_path):
    """An error that says so; the folder is not made."""
    with pytest.raises(CheckpointNotFound, match="no checkpoint yet"):
        spotsafe.load(tmp_path / "none")
    assert not Path(tmp_path / "none").exists()
