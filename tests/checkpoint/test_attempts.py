"""The record of an attempt: what is written is read, and nothing else is believed."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, strategies as st

from spotsafe.checkpoint import sealed
from spotsafe.checkpoint.attempts import (
    AttemptRecord,
    attempt_exists,
    decode_record,
    encode_record,
    newer_attempt,
    printable,
    read_attempt,
)
from spotsafe.checkpoint.layout import attempt_record
from spotsafe.errors import DamagedCheckpoint, StorageError, StorageNotFound, UnsupportedFormat
from spotsafe.testing.faults import FailingStore
from spotsafe.testing.memory import MemoryStore

RECORD = AttemptRecord(
    run="0123abcd",
    attempt=3,
    nonce="89ef0123",
    host="node-7",
    pid=4242,
    boot="b-1",
    job="SLURM_JOB_ID=9",
    arguments=("train.py", "--lr", "1e-3"),
    newest_seen="a000002-s000000300-0041-7f3a9c21",
    started=1_700_000_000.5,
    resumed_from="a000002-s000000300-0041-7f3a9c21",
    passed_over=("a000002-s000000400-0042-7f3a9c21",),
    passed_over_unhealthy_to="a000002-s000000300-0041-7f3a9c21",
    version="0.1.0",
)


def changed(**members: object) -> bytes:
    """A sealed record in which members are other than they should be."""
    return sealed.seal({"format": 1, "requires": [], **dataclasses.asdict(RECORD), **members})


def test_comes_back_as_written() -> None:
    """Every field survives the file."""
    assert decode_record(encode_record(RECORD), attempt=3) == RECORD


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_any_command_line_can_be_recorded(raw: list[bytes]) -> None:
    """Arguments with bytes that are no UTF-8, as `sys.argv` shows them, are written and read."""
    arguments = printable([item.decode("utf-8", "surrogateescape") for item in raw])
    record = dataclasses.replace(RECORD, arguments=arguments)
    assert decode_record(encode_record(record), attempt=3) == record


def test_printable_leaves_text_alone() -> None:
    """Ordinary arguments of any script are kept as they are; only stray bytes are spelled out."""
    assert printable(["--name", "h\u00e9llo", "\udce9"]) == ("--name", "h\u00e9llo", "\\xe9")


def test_unknown_members_are_ignored() -> None:
    """A later version may add members without breaking this one."""
    assert decode_record(changed(colour="blue"), attempt=3) == RECORD


@pytest.mark.parametrize(
    "members",
    [
        {"attempt": 4},
        {"attempt": "3"},
        {"attempt": True},
        {"pid": None},
        {"nonce": "89EF0123"},
        {"nonce": "../../x"},
        {"run": ""},
        {"arguments": "train.py"},
        {"newest_seen": 7},
        {"started": "now"},
        {"passed_over": [1]},
        {"format": "1"},
        {"format": None},
        {"requires": "x"},
    ],
)
def test_wrong_members_are_damage(members: dict[str, object]) -> None:
    """A record of the wrong shape is never half believed, and the error names the file."""
    with pytest.raises(DamagedCheckpoint, match=r"^attempts/000003\.json: "):
        decode_record(changed(**members), attempt=3)


@pytest.mark.parametrize("length", [0, 1, 40, 90, 200])
def test_every_truncation_is_damage(length: int) -> None:
    """A record that ends early is damaged, wherever it ends."""
    with pytest.raises(DamagedCheckpoint):
        decode_record(encode_record(RECORD)[:length], attempt=3)


def test_every_flipped_bit_is_damage() -> None:
    """No single flipped bit goes unnoticed."""
    data = encode_record(RECORD)
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with pytest.raises(DamagedCheckpoint):
                decode_record(bytes(flipped), attempt=3)


@pytest.mark.parametrize("members", [{"format": 2}, {"requires": ["leases"]}])
def test_newer_formats_are_told_apart_from_damage(members: dict[str, object]) -> None:
    """A higher format or an unknown requirement stops the start and says what to do."""
    with pytest.raises(UnsupportedFormat, match="upgrade spotsafe"):
        decode_record(changed(**members), attempt=3)


def test_read_by_key() -> None:
    """A record is read under its own number; one that is not there is not there."""
    store = MemoryStore()
    store.create(attempt_record(3), encode_record(RECORD))
    assert read_attempt(store, 3) == RECORD
    with pytest.raises(StorageNotFound):
        read_attempt(store, 4)


def test_damage_is_believed_after_a_second_read() -> None:
    """One bad answer of the store is no verdict."""
    store = MemoryStore()
    store.create(attempt_record(3), encode_record(RECORD))

    class OnceTorn(MemoryStore):
        """Answers the first read with half of the object."""

        reads = 0

        def read(self, path: str, *, max_bytes: int) -> bytes:
            self.reads += 1
            data = super().read(path, max_bytes=max_bytes)
            return data[: len(data) // 2] if self.reads == 1 else data

    torn = OnceTorn()
    torn.objects.update(store.objects)
    assert read_attempt(torn, 3) == RECORD
    assert torn.reads == 2


def test_existence_is_one_read_by_key() -> None:
    """Whether an attempt exists is never taken from a listing."""
    asked: list[str] = []
    store = MemoryStore()
    store.create(attempt_record(3), b"anything")
    spy = FailingStore(store, fail=lambda name, path, number: asked.append(f"{name} {path}"))
    assert attempt_exists(spy, 3)
    assert not attempt_exists(spy, 4)
    assert newer_attempt(spy, 2) == 3
    assert newer_attempt(spy, 3) is None
    assert {line.split()[0] for line in asked} == {"read"}


def test_could_not_look_is_not_absence() -> None:
    """A store that fails to answer never makes an attempt seem absent."""
    store = FailingStore(MemoryStore(), fail=lambda name, path, number: StorageError("no answer"))
    with pytest.raises(StorageError):
        attempt_exists(store, 1)
    with pytest.raises(StorageError):
        newer_attempt(store, 1)
