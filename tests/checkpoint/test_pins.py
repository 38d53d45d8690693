"""Pins: what a reader keeps is not deleted, wherever reader and deleter meet."""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import pytest

from spotsafe.checkpoint import gc, pins, sealed
from spotsafe.checkpoint.candidates import candidates, look, read_candidate
from spotsafe.checkpoint.layout import PINS, CheckpointName
from spotsafe.checkpoint.manifest import Marker, encode_marker
from spotsafe.checkpoint.pins import SLACK_S, Pin, pinned, pinned_manifest, place_pin, read_pins, remove_pins
from spotsafe.checkpoint.verify import verify
from spotsafe.errors import CheckpointNotFound, DamagedCheckpoint, StorageError, StorageUnavailable
from spotsafe.identity import Identity
from spotsafe.policy.retention import latest
from spotsafe.storage.wrapping import Operation, WrappingStore
from spotsafe.testing.faults import CountingStore, FailingStore, LostResponseStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.saves import Attempt, steps_of

T = TypeVar("T")

ME = Identity.of_this_process(environ={}, argv=["evaluate.py"])
TWO = gc.Retention(keep=latest(2), resumed_from=None)
UNTIL = 1_800_000_000.0


def run_of(*steps: int) -> tuple[MemoryStore, list[CheckpointName]]:
    store = MemoryStore()
    attempt = Attempt(store, keep=latest(100))
    return store, [attempt.save(step).name for step in steps]


def retain(store: MemoryStore, *, now: float = 0.0, attempt: int = 1) -> list[CheckpointName]:
    return gc.apply_retention(store, attempt=attempt, retention=TWO, on_event=lambda _: None, now=now)


def there(store: MemoryStore) -> list[int]:
    return steps_of(list(candidates(store, look(store))))


@pytest.mark.parametrize("attempt", [1, 2])
def test_retention_leaves_a_pinned_checkpoint_alone(attempt: int) -> None:
    """A pinned checkpoint stays, whole, whoever's it is; without its pin it goes."""
    store, names = run_of(1, 2, 3, 4)
    place_pin(store, names[0], until=UNTIL, identity=ME)

    retain(store, attempt=attempt)

    assert there(store) == [4, 3, 1]
    assert verify(store, names[0]) == []
    assert remove_pins(store, names[0]) == 1
    retain(store, attempt=attempt)
    assert there(store) == [4, 3]
    assert store.names(PINS) == []


def test_a_pin_ends_at_its_time_and_is_removed() -> None:
    """A killed reader keeps a checkpoint as long as it said, and a while longer for clocks that differ."""
    store, names = run_of(1, 2, 3)
    place_pin(store, names[0], until=UNTIL, identity=ME)

    retain(store, now=UNTIL + SLACK_S)
    assert there(store) == [3, 2, 1]
    retain(store, now=UNTIL + SLACK_S + 1)

    assert there(store) == [3, 2]
    assert store.names(PINS) == []


def test_an_expired_pin_that_cannot_be_removed_is_no_obstacle() -> None:
    """What the store refuses to delete is over all the same."""
    store, names = run_of(1)
    place_pin(store, names[0], until=0.0, identity=ME)
    refusing = FailingStore(store, fail=lambda name, *_: StorageError("no") if name == "delete" else None)

    assert pinned(refusing, names, now=UNTIL) == frozenset()


def test_any_of_several_pins_keeps() -> None:
    """Two readers of one checkpoint: the later end counts."""
    store, names = run_of(1)
    place_pin(store, names[0], until=0.0, identity=ME)
    place_pin(store, names[0], until=UNTIL, identity=ME)

    assert pinned(store, names, now=UNTIL) == frozenset(names)
    assert len(store.names(PINS)) in {1, 2}
    assert remove_pins(store, names[0]) >= 1


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", b"x" * (pins.MAX_BYTES // 2)])
def test_an_unreadable_pin_keeps_its_checkpoint(damage: bytes) -> None:
    """Nobody knows how long it counts, so it counts."""
    store, names = run_of(1, 2, 3)
    store.put(f"{PINS}/{names[0]}.00000000.json", damage)

    retain(store, now=UNTIL * 2)

    assert there(store) == [3, 2, 1]
    assert read_pins(store) == [(names[0], None)]


def changed(pin: Pin, **members: object) -> bytes:
    document = {name: getattr(pin, name) for name in Pin.__dataclass_fields__}
    return sealed.seal({"format": 1, "requires": [], **document, **members})


@pytest.mark.parametrize(
    "members",
    [
        {"format": 2},
        {"requires": ["leases"]},
        {"checkpoint": "../../x"},
        {"nonce": "ffffffff"},
        {"until": "tomorrow"},
        {"manifest": "?"},
        {"manifest": "e30="},
    ],
)
def test_a_pin_with_wrong_members_is_unreadable(members: dict[str, object]) -> None:
    """Of another version, for another checkpoint, of another shape: it keeps, and its content is not used."""
    store, names = run_of(1)
    pin = place_pin(store, names[0], until=0.0, identity=ME)
    store.objects[pin.path] = changed(pin, **members)

    assert read_pins(store) == [(names[0], None)]
    assert pinned(store, names, now=UNTIL) == frozenset(names)
    assert pinned_manifest(store, names[0]) is None


@pytest.mark.parametrize("file", ["notes.txt", "a1.json", "x.00000000.json", ".00000000.json"])
def test_foreign_names_are_no_pins(file: str) -> None:
    """A stray file keeps nothing and is not touched."""
    store, names = run_of(1)
    store.put(f"{PINS}/{file}", b"")

    assert pinned(store, names, now=0.0) == frozenset()
    assert f"{PINS}/{file}" in store.objects


def test_only_what_is_published_can_be_pinned() -> None:
    """A checkpoint that is not there, withdrawn or damaged is an error, and leaves no pin."""
    store, names = run_of(1, 2, 3)
    del store.objects[names[0].manifest]
    store.objects[names[1].manifest] = encode_marker(Marker(state="retired"))
    store.objects[names[2].manifest] = b"{"
    for name, error in zip(names, [CheckpointNotFound, CheckpointNotFound, DamagedCheckpoint], strict=True):
        with pytest.raises(error, match=str(name)):
            place_pin(store, name, until=UNTIL, identity=ME)
    assert store.names(PINS) == []


def test_no_look_at_pins_no_deletion() -> None:
    """Could not look is never "there is none": nothing is deleted then."""
    store, names = run_of(1, 2, 3)
    place_pin(store, names[0], until=UNTIL, identity=ME)
    before = dict(store.objects)
    failing = FailingStore(
        store, fail=lambda name, path, number: StorageUnavailable("down") if path.startswith(PINS) else None
    )

    with pytest.raises(StorageUnavailable):
        gc.apply_retention(failing, attempt=1, retention=TWO, on_event=lambda _: None)

    assert store.objects == before


def test_sweep_leaves_what_is_pinned_and_withdrawn() -> None:
    """The files of a checkpoint that was withdrawn while it was being pinned stay until the pin is over."""
    store, names = run_of(1, 2)
    place_pin(store, names[0], until=UNTIL, identity=ME)
    store.objects[names[0].manifest] = encode_marker(Marker(state="retired"))
    del store.objects[names[1].manifest]

    gc.sweep(store, attempt=2, on_event=lambda _: None)

    assert len(store.list(names[0].folder)) == 4
    assert len(store.list(names[1].folder)) == 1
    gc.sweep(store, attempt=2, on_event=lambda _: None, now=UNTIL * 2)
    assert len(store.list(names[0].folder)) == 1


def test_nothing_to_delete_costs_no_look() -> None:
    """Saves that retire nothing do not ask for pins."""
    store, _ = run_of(1, 2)
    counting = CountingStore(store)
    gc.apply_retention(counting, attempt=1, retention=TWO, on_event=lambda _: None)
    assert PINS not in {operation.path for operation in counting.operations}


class Meeting(WrappingStore):
    """Lets the other party act right before or after operation `at`."""

    def __init__(self, inner: MemoryStore, *, at: int, after: bool, other: Callable[[], object]) -> None:
        super().__init__(inner)
        self.at, self.after, self.other, self.count = at, after, other, 0

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Count, and let the other one in."""
        self.count += 1
        mine = self.count == self.at
        if mine and not self.after:
            self.other()
        result = call()
        if mine and self.after:
            self.other()
        return result


@pytest.mark.parametrize("attempt", [1, 2], ids=["own", "of another"])
@pytest.mark.parametrize("after", [False, True])
def test_whoever_is_told_that_it_is_pinned_can_read_it(attempt: int, after: bool) -> None:
    """A reader pins between any two operations of retention: refused, or every byte stays readable."""
    outcomes = set()
    for at in range(1, 40):
        store, names = run_of(1, 2, 3)
        got: list[Pin] = []

        def pin_it(
            store: MemoryStore = store, names: list[CheckpointName] = names, got: list[Pin] = got
        ) -> None:
            try:
                got.append(place_pin(store, names[0], until=UNTIL, identity=ME))
            except CheckpointNotFound:
                outcomes.add("refused")

        meeting = Meeting(store, at=at, after=after, other=pin_it)
        gc.apply_retention(meeting, attempt=attempt, retention=TWO, on_event=lambda _: None)
        gc.sweep(store, attempt=attempt + 1, on_event=lambda _: None)
        if got:
            manifest = read_candidate(store, names[0]).manifest or pinned_manifest(store, names[0])
            assert manifest is not None, at
            outcomes.add("published" if read_candidate(store, names[0]).manifest else "withdrawn, readable")
            store.objects[names[0].manifest] = _manifest_in(got[0])
            assert verify(store, names[0]) == [], at
    assert outcomes == {"refused", "published", "withdrawn, readable"}


@pytest.mark.parametrize("after", [False, True])
def test_retention_between_any_two_operations_of_the_reader(after: bool) -> None:
    """The same, the other way round: a whole retention inside of `place_pin`."""
    outcomes = set()
    for at in range(1, 6):
        store, names = run_of(1, 2, 3)
        meeting = Meeting(store, at=at, after=after, other=lambda store=store: retain(store, attempt=2))
        try:
            place_pin(meeting, names[0], until=UNTIL, identity=ME)
        except CheckpointNotFound:
            assert pinned(store, names, now=0.0) == frozenset(), "a refused reader leaves no pin"
            outcomes.add("refused")
        else:
            outcomes.add("pinned")
            assert verify(store, names[0]) == [] or meeting.count < at
    assert outcomes == {"refused", "pinned"}


def _manifest_in(pin: Pin) -> bytes:
    return base64.b64decode(pin.manifest)


@pytest.mark.parametrize("after", [False, True])
def test_reader_dies_at_every_operation(after: bool) -> None:
    """Whatever a killed reader leaves behind keeps nothing for longer than it said."""
    for at in range(1, 6):
        store, names = run_of(1, 2, 3)

        def die() -> None:
            raise KeyboardInterrupt

        with suppress(KeyboardInterrupt):
            place_pin(Meeting(store, at=at, after=after, other=die), names[0], until=UNTIL, identity=ME)
        retain(store, now=UNTIL + SLACK_S + 1)
        assert there(store) == [3, 2]
        assert store.names(PINS) == []


def test_a_lost_answer_leaves_a_pin_that_ends_by_itself() -> None:
    """The reader is told that it is unknown; the pin may be there and is over at its time."""
    store, names = run_of(1, 2, 3)
    with pytest.raises(StorageUnavailable):
        place_pin(LostResponseStore(store), names[0], until=UNTIL, identity=ME)
    retain(store, now=0.0)
    assert there(store) == [3, 2, 1]
    retain(store, now=UNTIL + SLACK_S + 1)
    assert there(store) == [3, 2]
