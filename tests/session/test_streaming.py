"""A state that fits in no slot is written through a small one, while training waits; nothing else differs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import spotsafe
from spotsafe import copying, events as ev
from spotsafe.checkpoint.candidates import candidates, look
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.verify import verify
from spotsafe.errors import StorageUnavailable
from spotsafe.loading import decode, with_selected
from spotsafe.policy.staging_memory import LEAST_BYTES
from spotsafe.storage.local import LocalStore
from spotsafe.storage.store import Store
from spotsafe.testing.faults import FailingStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.sinks import RecordingSink
from spotsafe.writer.process import can_run
from tests.session.rig import MANY_STARTS
from tests.writer.processes import the_writer, writers

WRITERS = [
    "thread",
    pytest.param(
        "process",
        marks=pytest.mark.skipif(not can_run(), reason="this system cannot have a writer process"),
    ),
]


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A runtime folder of its own; no process is left at the end."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
    yield
    assert not writers()


class Large:
    """Seven MiB, four slots full: a tensor that must be cut, many small ones, a frozen module, an empty one."""

    def __init__(self) -> None:
        self.sink = RecordingSink()
        self.model = torch.nn.Linear(1024, 512).requires_grad_(False)  # 2 MiB
        self.state: dict[str, Any] = {
            "wide": torch.zeros(3, 1 << 18),
            "empty": torch.zeros(0),
            **{f"small{number}": torch.zeros(1 << 14) for number in range(32)},
        }
        self.values = self.state | {"model": self.model}

    def fill(self, number: int) -> None:
        for tensor in self.state.values():
            tensor.fill_(number)

    def session(self, store: Any, **options: Any) -> spotsafe.Run:
        defaults: dict[str, Any] = {
            "save_every": 1,
            "keep": 10,
            "watch": None,
            "events": self.sink,
            "restart_limits": MANY_STARTS,
            "staging_memory": LEAST_BYTES,
        }
        return spotsafe.session(store, state=self.values, **{**defaults, **options})

    def run(
        self, store: Any, steps: int, *, each: Callable[[int], object] = lambda _: None, **options: Any
    ) -> spotsafe.Run:
        with self.session(store, **options) as run:
            for step in run.range(steps):
                self.fill(step + 1)
                each(step)
                run._attempt.points.drain()  # type: ignore[union-attr] # it is started
        return run


def numbers(store: Store, name: CheckpointName) -> set[float]:
    """The least and the greatest in some of its tensors."""
    values = with_selected(store, name.step, lambda opened: decode(opened, dict(opened.contents.values)))
    large = [values["wide"], values["small7"]]
    return {number for one in large for number in (one.min().item(), one.max().item())}


def published(store: Store) -> list[int]:
    """The steps that are there, newest first; each is whole, and of one step alone."""
    found = [one.name for one in candidates(store, look(store)) if one.manifest is not None]
    for name in found:
        assert verify(store, name) == []
        assert numbers(store, name) == {name.step}
    return [name.step for name in found]


@pytest.mark.parametrize("writer", WRITERS)
def test_it_is_saved_and_said_once(tmp_path: Path, writer: str) -> None:
    """Every checkpoint is whole, no file is larger than the slot, and a resume has the very values."""
    large, store = Large(), LocalStore(tmp_path / "run")
    before = large.model.weight.clone()
    run = large.run(tmp_path / "run", 3, writer=writer)
    assert run.failures == ()
    assert published(store) == [3, 2, 1]
    sizes = [path.stat().st_size for path in (tmp_path / "run").glob("checkpoints/*/data-*")]
    assert len(sizes) >= 12
    assert max(sizes) <= LEAST_BYTES
    [told] = [one.message for one in large.sink.of(ev.Warned)]
    assert "do not fit in the memory" in told
    assert "2.1 MB, piece by piece, while training waits" in told
    again = Large()
    with again.session(tmp_path / "run", writer=writer) as resumed:
        assert resumed.step == 3
    assert torch.equal(again.model.weight, before)
    assert {one.min().item() for one in again.state.values() if len(one)} == {3}
    arena = run._attempt.saver._slots  # type: ignore[union-attr] # it was started
    assert arena.choice is not None
    assert arena.choice.size == LEAST_BYTES


def test_with_room_nothing_is_streamed() -> None:
    """One file, as ever, and nobody is told."""
    large, store = Large(), MemoryStore()
    large.run(store, 2, staging_memory=64 << 20)
    assert published(store) == [2, 1]
    assert large.sink.of(ev.Warned) == []


def test_a_store_that_fails_in_the_middle_ends_the_copy() -> None:
    """Training goes on; the save counts as failed, and its files are gone with the next."""
    large, inner = Large(), MemoryStore()

    def fail(name: str, path: str, number: int) -> Exception | None:
        ill = name == "put_large" and "-s000000002-" in path and path.endswith("-002.safetensors")
        return StorageUnavailable(f"{path}: no answer", path=path) if ill else None

    run = large.run(FailingStore(inner, fail=fail), 3)
    assert published(inner) == [3, 1]
    assert len(run.failures) == 1
    assert not [path for path in inner.objects if "-s000000002-" in path]
    assert [one.checkpoint.split("-")[1] for one in large.sink.of(ev.SaveStaged)] == [
        "s000000001",
        "s000000003",
    ]


@pytest.mark.parametrize("writer", WRITERS)
def test_an_interrupt_in_the_middle(tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, after which the program goes on: half a state is never published, and the end is saved."""
    large, real, pieces = Large(), copying.stage, list[int]()

    def stage(*args: Any, **more: Any) -> None:
        pieces.append(1)
        if len(pieces) == 7:
            raise KeyboardInterrupt
        real(*args, **more)

    monkeypatch.setattr(copying, "stage", stage)
    with large.session(tmp_path / "run", writer=writer, save_every=None) as run:
        for step in run.range(3):
            large.fill(step + 1)
            if step == 1:
                run.save()
                run.wait()
        large.fill(2)
        with pytest.raises(KeyboardInterrupt):
            run.save()
        large.fill(3)
    store = LocalStore(tmp_path / "run")
    assert published(store) == [3, 2]
    assert run.failures == ()


@pytest.mark.skipif(not can_run(), reason="this system cannot have a writer process")
def test_the_writer_dies_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training does not wait for a process that is gone; the next safe point saves."""
    large, real, pieces = Large(), copying.stage, list[int]()

    def stage(*args: Any, **more: Any) -> None:
        pieces.append(1)
        if len(pieces) == 7:
            os.kill(the_writer(), signal.SIGKILL)
        real(*args, **more)

    monkeypatch.setattr(copying, "stage", stage)
    run = large.run(tmp_path / "run", 4, writer="process")
    assert published(LocalStore(tmp_path / "run")) == [4, 3, 1]
    assert run.failures == ()
    assert len(large.sink.of(ev.WriterReplaced)) == 1


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (LEAST_BYTES - 1, ValueError),
        (0, ValueError),
        ("512 MiB", ValueError),
        (True, TypeError),
        (1e9, TypeError),
    ],
    ids=str,
)
def test_other_amounts_are_refused(value: Any, error: type[Exception]) -> None:
    """With what there may be."""
    with pytest.raises(error, match='staging_memory= is "auto" or a number of bytes of at least 2097152'):
        Large().session(MemoryStore(), staging_memory=value)
