"""One look gives the digests and the NaN that two looks give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from spotsafe.checkpoint.digest import BLOCK, block_digests
from spotsafe.writer import examining
from spotsafe.writer.examining import CHUNK, examine, spans_by_file
from spotsafe.writer.health import scan
from spotsafe.writer.job import HealthSpan, StagedFile

FLOATS = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "complex64",
    "complex128",
    "float8_e5m2",
    "float8_e4m3fn",
)


def span(tensor: str, start: int, nbytes: int, dtype: str = "float32", role: str = "parameter") -> HealthSpan:
    return HealthSpan(tensor, start, nbytes, dtype, role)


def looked_at(data: bytes, spans: list[HealthSpan], *, offset: int = 0) -> examining.Examined:
    """As a file that begins at an offset of the arena."""
    arena = memoryview(bytes(offset) + data)
    file = StagedFile(name="data", arena_offset=offset, size=len(data))
    found = examine(file, arena=arena, spans=spans)
    assert found.digests == block_digests(data)
    assert found.scan == scan(spans, arena=arena)
    return found


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), None])
def test_one_bad_value_anywhere(dtype: str, bad: float | None) -> None:
    """At the edges of chunks and of the file too; and none where there is none."""
    if bad in {float("inf"), -float("inf")} and dtype == "float8_e4m3fn":
        bad = float("nan")  # it has no infinity
    kind = getattr(torch, dtype)
    count = 2 * CHUNK // kind.itemsize + 3
    header = 4096
    for at in (0, CHUNK // kind.itemsize - 1, (CHUNK - header) // kind.itemsize, count - 1):
        values = torch.ones(count, dtype=torch.complex64 if kind.is_complex else torch.float32).to(kind)
        if bad is not None:
            values[at] = bad
        data = bytes(header) + values.view(torch.uint8).numpy().tobytes()
        found = looked_at(data, [span("w", 4096 + header, len(data) - header, dtype)], offset=4096)
        assert found.scan.state == (frozenset() if bad is None else {"w"})


def test_a_file_of_several_blocks() -> None:
    """Digests are those of the blocks, whatever the parts that are looked at."""
    values = np.ones((2 * BLOCK + 12) // 4, dtype=np.float32)
    values[BLOCK // 4 + 7] = np.inf
    spans = [span("a", 0, BLOCK), span("b", BLOCK, BLOCK, role="buffer"), span("c", 2 * BLOCK, 12)]
    found = looked_at(values.tobytes(), spans)
    assert len(found.digests) == 3
    assert (found.scan.state, found.scan.buffers) == (frozenset(), {"b"})


def test_the_largest_values_are_not_taken_for_infinite() -> None:
    """Of either sign, in any number."""
    for dtype in (np.float32, np.float64):
        values = np.full(CHUNK // 4, np.finfo(dtype).max, dtype=dtype)
        values[::3] *= -1
        name = np.dtype(dtype).name
        assert not looked_at(values.tobytes(), [span("w", 0, values.nbytes, name)]).scan.state


def test_values_across_the_edge_of_a_chunk() -> None:
    """A file whose tensors do not begin at multiples of their items; ours never do so, but a look must not fail."""
    values = np.ones(CHUNK // 4 + 5, dtype=np.float64)
    values[CHUNK // 8 - 1] = np.nan
    data = bytes(4) + values.tobytes()
    assert looked_at(data, [span("w", 4, values.nbytes, "float64")]).scan.state == {"w"}


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (span("w", 0, 6), "whole number|multiple"),
        (span("w", 4096, 8000), "are outside data"),
        (span("w", 9000, 4), "lies in no file"),
        (span("w", 100, 4), "are outside data"),
    ],
)
def test_what_is_not_there(one: HealthSpan, message: str) -> None:
    """Spans outside the files, or of half a value, are an error of ours, not a verdict."""
    arena = memoryview(bytes(8192))
    files = [StagedFile(name="data", arena_offset=4096, size=4096)]
    if one.arena_offset == 0:
        files = [StagedFile(name="data", arena_offset=0, size=4096)]
    with pytest.raises(ValueError, match=message):
        for file, spans in spans_by_file(files, [one]):
            examine(file, arena=arena, spans=spans)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(FLOATS),
            st.integers(0, 40),
            st.sampled_from(["parameter", "moment", "buffer"]),
            st.sampled_from([None, float("nan"), float("inf")]),
        ),
        max_size=12,
    ),
    st.sampled_from([64, 128, 4096]),
)
def test_many_small_ones(kinds: list[tuple[str, int, str, float | None]], chunk: int) -> None:
    """Any mixture, with parts so small that they cut everywhere."""
    data, spans = b"", []
    ordered = sorted(kinds, key=lambda kind: -getattr(torch, kind[0]).itemsize)
    for number, (dtype, count, role, bad) in enumerate(ordered):
        kind = getattr(torch, dtype)
        values = torch.ones(count, dtype=torch.complex64 if kind.is_complex else torch.float32).to(kind)
        if bad is not None and count:
            values[count // 2] = float("nan") if kind.itemsize == 1 else bad
        raw = values.view(torch.uint8).numpy().tobytes() if count else b""
        spans.append(span(f"t{number}", len(data), len(raw), dtype, role))
        data += raw
    before, examining.CHUNK = examining.CHUNK, chunk
    try:
        looked_at(data, [one for one in spans if one.nbytes])
    finally:
        examining.CHUNK = before
