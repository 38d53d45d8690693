"""Names: what is written is parsed back, and nothing else parses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from spotsafe.checkpoint import layout
from spotsafe.checkpoint.layout import CheckpointName

numbers = st.integers(0, 10**12)
names = st.builds(
    CheckpointName, numbers, numbers, numbers, st.text("0123456789abcdef", min_size=8, max_size=8)
)


@given(names)
@settings(max_examples=100)
def test_a_name_is_parsed_back(name: CheckpointName) -> None:
    """Numbers may outgrow their padding."""
    assert CheckpointName.parse(str(name)) == name
    assert name.folder == f"checkpoints/{name}"
    assert name.manifest == f"checkpoints/{name}/manifest.json"


@given(st.lists(names, max_size=8))
@settings(max_examples=50)
def test_the_order_is_that_of_the_numbers_not_of_the_text(some: list[CheckpointName]) -> None:
    """(attempt, step, save), as integers."""
    ordered = sorted(some)
    keys = [(name.attempt, name.step, name.save) for name in ordered]
    assert keys == sorted(keys)
    assert CheckpointName(1_000_000, 0, 0, "0" * 8) > CheckpointName(999_999, 5, 5, "f" * 8)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a000012-s000000300-0041-7F3A9C21",
        "a000012-s000000300-0041-7f3a9c2",
        "a000012-s000000300-0041-7f3a9c211",
        "a12-s300-41-7f3a9c21",
        "a0000012-s000000300-0041-7f3a9c21",
        "a000012-s000000300-00041-7f3a9c21",
        "a000012-s000000300-0041-7f3a9c21\n",
        " a000012-s000000300-0041-7f3a9c21",
        "a00001\u0662-s000000300-0041-7f3a9c21",
        "a-00012-s000000300-0041-7f3a9c21",
        "a000012-s000000300-0041-7f3a9c21/x",
        "../a000012-s000000300-0041-7f3a9c21",
    ],
)
def test_anything_but_the_exact_spelling_is_no_checkpoint(text: str) -> None:
    """Folders of other tools, leftovers and tricks are not ours."""
    assert CheckpointName.parse(text) is None


@given(st.text(max_size=40))
@settings(max_examples=100)
def test_what_parses_spells_itself(text: str) -> None:
    """There is one spelling for each name."""
    name = CheckpointName.parse(text)
    assert name is None or str(name) == text


def test_names_of_files_are_parsed_back() -> None:
    """Data and index files, of ranks and numbers beyond the padding too."""
    name = CheckpointName(1, 2, 3, "0" * 8)
    for file in (layout.data_file(0, 0), layout.data_file(123_456, 1_234), layout.index_file(7)):
        assert layout.is_file_name(file)
        assert name.file(file) == f"{name.folder}/{file}"
    assert layout.data_file(1, 2) == "data-00001-002.safetensors"
    assert layout.index_file(1) == "index-00001.json"
    assert layout.is_data_file(layout.data_file(1, 2))
    assert not layout.is_data_file(layout.index_file(1))


@pytest.mark.parametrize(
    "file",
    ["", "manifest.json", "data-0-0.safetensors", "../data-00000-000.safetensors", "data-00000-000.safetensors/",
     "/data-00000-000.safetensors", "data-00000-000.safetensors\n", "data-00000-000.pt", "index-00000.json.tmp",
     "data-00000-000.SAFETENSORS", "x/index-00000.json"],
)  # fmt: skip
def test_a_path_or_a_stranger_is_no_file_name(file: str) -> None:
    """A reference must not lead out of the folder."""
    assert not layout.is_file_name(file)
    assert not layout.is_data_file(file)
    with pytest.raises(ValueError, match="not a file name"):
        CheckpointName(1, 2, 3, "0" * 8).file(file)


def test_names_of_attempts_are_parsed_back() -> None:
    """The record and the mark of having published are told apart."""
    assert layout.attempt_record(12) == "attempts/000012.json"
    assert layout.attempt_published(12) == "attempts/000012.published"
    assert layout.ledger_folder(12) == "ledger/000012"
    for attempt in (1, 12, 1_234_567):
        record = layout.attempt_record(attempt).removeprefix("attempts/")
        mark = layout.attempt_published(attempt).removeprefix("attempts/")
        assert (layout.parse_attempt(record), layout.parse_published(record)) == (attempt, None)
        assert (layout.parse_attempt(mark), layout.parse_published(mark)) == (None, attempt)


@pytest.mark.parametrize(
    "name", ["", "000000.json", "12.json", "000012.json.tmp", "a00012.json", "-00012.json"]
)
def test_a_stranger_is_no_attempt(name: str) -> None:
    """There is no attempt 0."""
    assert layout.parse_attempt(name) is None
    assert layout.parse_published(name.replace("json", "published")) is None


def test_names_of_a_ledger_are_parsed_back() -> None:
    """Pieces are numbered from one; the heartbeat and strangers are no pieces."""
    assert layout.ledger_events(12, 3) == "ledger/000012/events-000003.json"
    assert layout.ledger_heartbeat(12) == "ledger/000012/heartbeat.json"
    for number in (1, 12, 1_234_567):
        name = layout.ledger_events(12, number).rpartition("/")[2]
        assert layout.parse_ledger_events(name) == number
    for name in ("heartbeat.json", "events-000000.json", "events-1.json", "events-000001.json.tmp", ""):
        assert layout.parse_ledger_events(name) is None
