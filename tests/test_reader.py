"""Choosing a checkpoint, and reading it whole and verified."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, strategies as st

from spotsafe.checkpoint.candidates import Candidate, look, read_candidate
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.manifest import Health, Manifest
from spotsafe.errors import (
    DamagedCheckpoint,
    NoUsableCheckpoint,
    StorageNotFound,
    StorageUnavailable,
    UnsupportedFormat,
)
from spotsafe.events import CheckpointPassedOver, Event, RestoreStarted, RestoreVerified
from spotsafe.reader import Choice, choose, load_chosen, load_verified, pick, read_description
from spotsafe.storage.store import Store
from spotsafe.tensors.tree import Capture
from spotsafe.testing.faults import FailingStore, TearingStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.states import read_newest, write_checkpoint
from spotsafe.tracking import Tracker

# -- the decision, on values ---------------------------------------------------------------------------------------


def name(step: int, *, attempt: int = 1) -> CheckpointName:
    return CheckpointName(attempt, step, step, "0123abcd")


def candidate(step: int, kind: str = "good") -> Candidate:
    if kind == "damaged":
        fault = DamagedCheckpoint(checkpoint=str(name(step)), file="manifest.json", reason="torn")
        return Candidate(name=name(step), fault=fault)
    if kind == "newer":
        return Candidate(name=name(step), fault=UnsupportedFormat("format 9", checkpoint=str(name(step))))
    manifest = Manifest(
        run="0123abcd",
        attempt=1,
        step=step,
        save=step,
        nonce="0123abcd",
        parent=None,
        created=0.0,
        world_size=1,
        reason="interval",
        health=Health(healthy=kind != "sick", nonfinite=("w",) if kind == "sick" else ()),
    )
    return Candidate(name=name(step), manifest=manifest)


def decide(
    kinds: Sequence[str], unusable: Mapping[str, str] | None = None
) -> tuple[int | None, list[int], str | None, Choice | None]:
    """Kinds of checkpoints, newest first: the chosen place, those passed over, and to which healthy one."""
    found = [candidate(100 - place, kind) for place, kind in enumerate(kinds)]
    choice = pick(iter(found), unusable=unusable or {}, reasons={})
    if choice is None:
        return None, [], None, None
    places = {str(one.name): place for place, one in enumerate(found)}
    return (
        places[choice.name],
        [places[one] for one in choice.passed_over],
        choice.unhealthy_passed_to,
        choice,
    )


def test_the_newest_is_chosen() -> None:
    """The ordinary resume reads one manifest and passes over nothing."""

    def found() -> Sequence[Candidate]:
        yield candidate(3)
        raise AssertionError("read further than it must")

    choice = pick(found(), unusable={}, reasons={})  # type: ignore[arg-type] # a generator stands for an iterable
    assert choice is not None
    assert (choice.newest, choice.name, choice.passed_over) == (name(3), str(name(3)), {})
    assert choice.unhealthy_passed_to is None


@pytest.mark.parametrize(
    ("kinds", "chosen", "passed", "to"),
    [
        (["damaged", "good"], 1, [0], False),
        (["sick", "good"], 1, [0], True),
        (["sick", "damaged", "sick", "good", "good"], 3, [0, 1, 2], True),
        (["damaged", "sick", "damaged"], 1, [0], False),
        (["sick", "sick"], 0, [], False),
        (["good", "newer"], 0, [], False),
        ([], None, [], False),
        (["damaged"], None, [], False),
    ],
)
def test_the_walk_back(kinds: list[str], chosen: int | None, passed: list[int], to: bool) -> None:
    """The newest healthy one; the newest of all only if none is healthy; what is newer is passed over."""
    place, over, target, choice = decide(kinds)
    assert (place, over) == (chosen, passed)
    assert target == (choice.name if to and choice is not None else None)


def test_data_that_proved_damaged_is_passed_over() -> None:
    """A name whose files could not be used counts like a damaged manifest."""
    place, over, _, choice = decide(["good", "good"], {str(name(100)): "block 3 differs"})
    assert (place, over) == (1, [0])
    assert choice is not None
    assert choice.passed_over == {str(name(100)): "block 3 differs"}
    assert choice.newest == name(100)


def test_an_unknown_version_stops_the_walk() -> None:
    """A newer format before the choice is an error, never a walk-back; behind it, nobody looks."""
    for kinds in (["newer"], ["newer", "good"], ["sick", "newer", "good"]):
        with pytest.raises(UnsupportedFormat):
            decide(kinds)


@given(st.lists(st.sampled_from(["good", "sick", "damaged"]), max_size=8))
def test_the_decision_is_the_rule(kinds: list[str]) -> None:
    """Against the rule in words: first good, else first sick, else none; newer ones are passed over."""
    usable = [kinds.index(kind) for kind in ("good", "sick") if kind in kinds]
    expected = usable[0] if usable else None
    place, over, _, _ = decide(kinds)
    assert place == expected
    assert over == list(range(expected or 0))


# -- with a store --------------------------------------------------------------------------------------------------


def captured(value: float) -> Capture:
    tracker = Tracker(warn=print)
    tracker.add("a", torch.full((1000,), value))
    tracker.add("b", torch.arange(5))
    return tracker.capture(session={"values": {"v": value, "t": torch.ones(2)}})


def written(*values: float, max_file_bytes: int = 1 << 30) -> MemoryStore:
    store = MemoryStore()
    for step, value in enumerate(values, start=1):
        write_checkpoint(store, captured(value), step=step, max_file_bytes=max_file_bytes)
    return store


def files(store: Store, suffix: str, *, at: int = -1) -> str:
    """Path of a file of the newest checkpoint (or another one)."""
    newest = look(store).names[-1 - at]
    return next(entry.path for entry in store.list(newest.folder) if entry.path.endswith(suffix))


class Events(list[Event]):
    """Collects events."""

    def __call__(self, event: Event) -> None:
        self.append(event)


def load(store: Store, events: Events | None = None) -> float | None:
    """A start's choosing and reading, until something is loaded; the value that tells which."""
    unusable: dict[str, str] = {}
    said = Events() if events is None else events
    for _ in range(5):
        choice = choose(store, look(store), emit=said, unusable=unusable)
        if choice is None:
            return None
        loaded = load_chosen(store, choice, emit=said, unusable=unusable)
        if loaded is not None:
            return float(loaded.saved.tensors["a"][0])
    raise AssertionError("does not come to an end")


def test_a_checkpoint_comes_back_with_everything() -> None:
    """Tensors, state and the session's values, and events that say so."""
    store, events = written(1.0, 2.0), Events()
    choice = choose(store, look(store), emit=events)
    assert choice is not None
    loaded = load_verified(store, choice.candidate, emit=events)
    assert loaded.name.step == loaded.manifest.step == 2
    assert loaded.saved.tensors["a"].tolist() == [2.0] * 1000
    assert loaded.saved.tensors["b"].dtype == torch.int64
    values = loaded.session_values()
    assert values["values"]["v"] == 2.0  # type: ignore[index] # a dict, as it was saved
    assert values["values"]["t"].tolist() == [1, 1]  # type: ignore[index] # a dict, as it was saved
    assert [type(event) for event in events] == [RestoreStarted, RestoreVerified]
    assert events[0].total_bytes == loaded.manifest.total_bytes  # type: ignore[attr-defined] # RestoreStarted
    assert set(loaded.saved.state) == {"a", "b"}


def test_loaded_memory_is_its_own() -> None:
    """Overwriting or deleting what lies on storage changes nothing that was loaded."""
    store = written(1.0)
    loaded = read_newest(store)
    for entry in store.list(""):
        store.delete(entry.path)
    assert loaded.saved.tensors["a"].tolist() == [1.0] * 1000


def test_a_description_reads_no_data() -> None:
    """Names, dtypes, shapes and trees come from the index alone."""
    store = written(1.0)
    asked: list[str] = []

    def watch(operation: str, path: str, _: int) -> Exception | None:
        asked.append(path)
        return None

    choice = choose(store, look(store))
    assert choice is not None
    described = read_description(FailingStore(store, fail=watch), choice.candidate)
    assert described.tensors["a"] == ("float32", (1000,))
    assert described.state["b"]["kind"] == "tensor"
    assert described.session["values"]["v"] == 1.0
    assert not any(path.endswith(".safetensors") for path in asked)


def test_nothing_there_is_nothing() -> None:
    """An empty run has no choice, and that is no error here."""
    assert choose(MemoryStore(), look(MemoryStore())) is None


def damage(store: MemoryStore, path: str, change: str) -> None:
    data = bytearray(store.read(path, max_bytes=1 << 30))
    store.delete(path)
    if change == "flipped":
        data[len(data) // 2] ^= 4
    elif change == "shortened":
        del data[-3:]
    elif change == "lengthened":
        data += b"\0"
    elif change == "emptied":
        data.clear()
    if change != "removed":
        store.put(path, bytes(data))


@pytest.mark.parametrize("change", ["flipped", "shortened", "lengthened", "emptied", "removed"])
@pytest.mark.parametrize(
    "suffix", ["000.safetensors", "001.safetensors", "index-00000.json", "manifest.json"]
)
def test_every_damage_is_seen_and_walked_back_from(suffix: str, change: str) -> None:
    """Whatever happened to a file, the older checkpoint is loaded, and an event says why."""
    store = written(1.0, 2.0, max_file_bytes=3000)
    newest = look(store).names[0]
    damage(store, files(store, suffix), change)
    events = Events()
    assert load(store, events) == 1.0
    over = [event for event in events if isinstance(event, CheckpointPassedOver)]
    if (suffix, change) == ("manifest.json", "removed"):
        assert over == []
    else:
        assert {event.checkpoint for event in over} == {str(newest)}
        assert all(event.reason for event in over)


def test_a_swapped_file_is_seen() -> None:
    """A data file of another checkpoint has the right size and is not the right one."""
    store = written(1.0, 2.0)
    ours, theirs = files(store, "000.safetensors"), files(store, "000.safetensors", at=0)
    assert ours != theirs
    data = store.read(theirs, max_bytes=1 << 30)
    store.delete(ours)
    store.put(ours, data)
    assert load(store) == 1.0


def test_damage_names_checkpoint_file_and_bytes() -> None:
    """The error says where the damage lies."""
    store = written(1.0)
    path = files(store, "000.safetensors")
    damage(store, path, "flipped")
    choice = choose(store, look(store))
    assert choice is not None
    with pytest.raises(DamagedCheckpoint, match=r"bytes 0 to .* are not what was published") as caught:
        load_verified(store, choice.candidate)
    assert (caught.value.checkpoint, caught.value.file) == (choice.name, path.rpartition("/")[2])


@pytest.mark.parametrize("suffix", [".safetensors", "index-00000.json", "manifest.json"])
def test_a_second_read_is_believed(suffix: str) -> None:
    """Bytes that were torn on the way only once are no damage; torn twice, they are."""
    store = written(1.0, 2.0)
    newest = files(store, suffix)
    assert load(TearingStore(store, reads=1, matches=lambda path: path == newest)) == 2.0
    assert load(TearingStore(store, reads=2, matches=lambda path: path == newest)) == 1.0


def test_all_damaged_is_an_error_with_every_reason() -> None:
    """Checkpoints that exist but cannot be used are never a fresh start."""
    store = written(1.0, 2.0)
    for at in (0, -1):
        damage(store, files(store, "000.safetensors", at=at), "flipped")
    with pytest.raises(NoUsableCheckpoint) as caught:
        load(store)
    assert len(caught.value.reasons) == 2
    assert "Nothing was started afresh" in str(caught.value)


@pytest.mark.parametrize("operation", ["names", "read", "read_into", "size"])
def test_a_storage_error_is_never_damage(operation: str) -> None:
    """A store that does not answer stops the start, whatever it was asked."""
    store = written(1.0, 2.0)

    def fail(asked: str, path: str, _: int) -> Exception | None:
        return StorageUnavailable("no answer", path=path) if asked == operation else None

    with pytest.raises(StorageUnavailable):
        load(FailingStore(store, fail=fail))


def test_lack_of_memory_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is too small must not make a start walk back."""
    store = written(1.0, 2.0)

    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr("spotsafe.reader.torch.empty", refuse)
    with pytest.raises(MemoryError):
        load(store)


def test_a_checkpoint_that_is_retired_meanwhile() -> None:
    """If the manifest is gone with its files, the caller looks again; if it is there, the file is missing."""
    store = written(1.0, 2.0)
    choice = choose(store, look(store))
    assert choice is not None
    for entry in store.list(choice.candidate.name.folder):
        store.delete(entry.path)
    unusable: dict[str, str] = {}
    with pytest.raises(StorageNotFound):
        load_chosen(store, choice, emit=Events(), unusable=unusable)
    assert unusable == {}
    assert load(store) == 1.0


def test_unhealthy_ones_are_passed_over_loudly() -> None:
    """A checkpoint with NaN is left for an older healthy one; alone it is used."""
    store = written(1.0, float("nan"))
    # A bare tensor that is not trained is only reported, so make it a parameter.
    tracker = Tracker(warn=print)
    tracker.add("a", torch.full((3,), float("nan"), requires_grad=True))
    write_checkpoint(store, tracker.capture(), step=3)
    events = Events()
    choice = choose(store, look(store), emit=events)
    assert choice is not None
    assert choice.manifest.step == 2
    assert choice.unhealthy_passed_to == choice.name
    assert [event.reason for event in events] == ["unhealthy: NaN or infinity in a"]  # type: ignore[attr-defined]
    alone = MemoryStore()
    write_checkpoint(alone, tracker.capture(), step=3)
    choice = choose(alone, look(alone))
    assert choice is not None
    assert choice.unhealthy_passed_to is None


def test_ranges_of_many_blocks_are_read_at_once() -> None:
    """A file of several digest blocks is put together from parallel reads."""
    tracker = Tracker(warn=print)
    values = torch.arange(5 << 20, dtype=torch.int64)
    tracker.add("a", values)
    store = MemoryStore()
    write_checkpoint(store, tracker.capture())
    sizes: list[int] = []

    def watch(operation: str, _: str, __: int) -> Exception | None:
        sizes.append(operation == "read_into")
        return None

    choice = choose(store, look(store))
    assert choice is not None
    loaded = load_verified(FailingStore(store, fail=watch), choice.candidate, threads=3)
    assert torch.equal(loaded.saved.tensors["a"], values)
    assert sum(sizes) == 3


def test_a_manifest_without_parts_is_damaged() -> None:
    """A checkpoint that lists no index holds nothing to resume from."""
    store = written(1.0)
    found = read_candidate(store, look(store).names[0])
    assert found.manifest is not None
    empty = dataclasses.replace(found, manifest=dataclasses.replace(found.manifest, parts=()))
    with pytest.raises(DamagedCheckpoint, match="no index"):
        load_verified(store, empty)
    with pytest.raises(DamagedCheckpoint, match="no index"):
        read_description(store, empty)


def test_one_thread_is_the_callers_own() -> None:
    """With one thread every read happens in the caller's, one after another."""
    threads: set[int] = set()

    def watch(_: str, __: str, ___: int) -> Exception | None:
        threads.add(threading.get_ident())
        return None

    store = written(1.0)
    choice = choose(store, look(store))
    assert choice is not None
    loaded = load_verified(FailingStore(store, fail=watch), choice.candidate, threads=1)
    assert loaded.saved.tensors["a"].tolist() == [1.0] * 1000
    assert threads == {threading.get_ident()}
