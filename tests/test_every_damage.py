"""Damage of every kind at every place of a checkpoint: found at the next start, named, and walked back from.

One checkpoint with two data files of less than 4 KiB of data in all, an older one beside it. Every bit of every file
is flipped, every file cut to every length, and every two files change places. `make prove` does all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from spotsafe.checkpoint.candidates import look
from spotsafe.errors import NoUsableCheckpoint
from spotsafe.events import CheckpointPassedOver, Event
from spotsafe.reader import choose, load_chosen
from spotsafe.tensors.tree import Capture
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.states import write_checkpoint
from spotsafe.tracking import Tracker
from tests.proof import record

OLDER, NEWER = 1, 2
Change = Callable[[MemoryStore], None]


def captured(step: int) -> Capture:
    """Some tensors, and a value of each plain kind; all of it depends on the step."""
    tracker = Tracker(warn=print)
    tracker.add("weights", torch.arange(300, dtype=torch.float32) * step)
    tracker.add("counts", torch.full((40,), step, dtype=torch.int64))
    tracker.add("plain", {"step": torch.tensor(step), "rows": [torch.ones(3, dtype=torch.bfloat16) * step]})
    return tracker.capture()


@pytest.fixture(scope="module")
def run() -> MemoryStore:
    """A run with two checkpoints."""
    store = MemoryStore()
    for step in (OLDER, NEWER):
        write_checkpoint(store, captured(step), step=step, max_file_bytes=800)
    return store


def paths(store: MemoryStore, step: int) -> list[str]:
    """Every file of a checkpoint."""
    name = next(name for name in look(store).names if name.step == step)
    return sorted(path for path in store.objects if path.startswith(f"{name.folder}/"))


def resumed(store: MemoryStore) -> tuple[int, str]:
    """Which step a start resumes from, and why it did not take the newer one."""
    said: list[Event] = []
    unusable: dict[str, str] = {}
    while True:
        choice = choose(store, look(store), emit=said.append, unusable=unusable)
        assert choice is not None
        loaded = load_chosen(store, choice, emit=said.append, unusable=unusable, threads=1)
        if loaded is not None:
            value = int(loaded.saved.tensors["counts"][0])
            reasons = [event.reason for event in said if isinstance(event, CheckpointPassedOver)]
            return value, " ".join(reasons)


def flips(store: MemoryStore, every: int) -> Iterator[tuple[str, Change]]:
    """Each file with one bit turned over, for every so-manieth bit."""
    for path in paths(store, NEWER):
        for bit in range(0, len(store.objects[path]) * 8, every):

            def change(damaged: MemoryStore, path: str = path, bit: int = bit) -> None:
                data = bytearray(damaged.objects[path])
                data[bit // 8] ^= 1 << bit % 8
                damaged.objects[path] = bytes(data)

            yield path, change


def cuts(store: MemoryStore, every: int) -> Iterator[tuple[str, Change]]:
    """Each file cut to every length that is a multiple of `every`."""
    for path in paths(store, NEWER):
        for length in range(0, len(store.objects[path]), every):

            def change(damaged: MemoryStore, path: str = path, length: int = length) -> None:
                damaged.objects[path] = damaged.objects[path][:length]

            yield path, change


def check(store: MemoryStore, cases: Iterable[tuple[str, Change]]) -> int:
    """Every case is found, named and walked back from; how many there were."""
    done = 0
    for path, change in cases:
        damaged = store.copy()
        change(damaged)
        step, why = resumed(damaged)
        assert step == OLDER, f"a damaged {path} was loaded"
        assert path.rpartition("/")[2] in why, f"{path} is damaged, and what is said is: {why}"
        done += 1
    return done


def test_without_damage_the_newer_one_is_resumed_from(run: MemoryStore) -> None:
    """The check can fail; and there is not more data than a test of every bit can go through."""
    assert resumed(run.copy()) == (NEWER, "")
    assert len(paths(run, NEWER)) >= 4, "two data files, an index and a manifest"


@pytest.mark.parametrize("every", [997, pytest.param(101, marks=pytest.mark.slow)])
def test_flipped_bits(run: MemoryStore, every: int) -> None:
    """A single wrong bit, anywhere."""
    assert check(run, flips(run, every)) > 50


@pytest.mark.parametrize("every", [211, pytest.param(19, marks=pytest.mark.slow)])
def test_truncations(run: MemoryStore, every: int) -> None:
    """A file of any shorter length."""
    assert check(run, cuts(run, every)) > 50


def test_swaps(run: MemoryStore) -> None:
    """Any two files in each other's place, of one checkpoint or of two: none is loaded as what it is not."""
    everything = [*paths(run, OLDER), *paths(run, NEWER)]
    pairs = list(itertools.combinations(everything, 2))
    for one, other in pairs:
        damaged = run.copy()
        damaged.objects[one], damaged.objects[other] = damaged.objects[other], damaged.objects[one]
        hit = {path for path in (one, other) if path in paths(run, NEWER)}
        same = run.objects[one] == run.objects[other]
        if len(hit) < 1 or same:
            assert resumed(damaged)[0] == NEWER
        elif len(hit) == 2:
            step, why = resumed(damaged)
            assert step == OLDER
            assert any(path.rpartition("/")[2] in why for path in hit)
        else:
            with pytest.raises(NoUsableCheckpoint, match=r"safetensors|index-00000|manifest"):
                resumed(damaged)
    record("two files of two checkpoints in each other's place", pairs=len(pairs), loaded=0)


@pytest.mark.prove
def test_every_bit_and_every_length(run: MemoryStore) -> None:
    """All of them."""
    record("single bits flipped in a checkpoint", bits=check(run, flips(run, 1)), loaded=0)
    record("lengths to which files of a checkpoint were cut", lengths=check(run, cuts(run, 1)), loaded=0)
