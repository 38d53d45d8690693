"""Health: every NaN and infinity of every floating type is found, and nothing else is."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from spotsafe.writer import health
from spotsafe.writer.health import CHUNK, Scan, is_finite, scan
from spotsafe.writer.job import HealthSpan

FLOATS = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e5m2",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    *(["float8_e8m0fnu"] if hasattr(torch, "float8_e8m0fnu") else []),
]
SHORT = [name for name in FLOATS if getattr(torch, name).itemsize <= 2]


def raw(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", SHORT)
def test_every_bit_pattern_of_the_short_types(name: str) -> None:
    """For each of the 256 or 65,536 patterns the verdict is torch's own."""
    dtype = getattr(torch, name)
    size = dtype.itemsize
    for pattern in range(1 << 8 * size):
        data = pattern.to_bytes(size, "little")
        value = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
        if size == 1 or pattern % 0x80 in {0, 1, 0x7F}:  # each exponent with its extreme fractions
            assert is_finite(data, dtype=name) == bool(torch.isfinite(value.to(torch.float32)).all()), hex(
                pattern
            )


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16", "complex64", "complex128"])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_one_bad_value_anywhere(name: str, bad: float) -> None:
    """A single bad value is found wherever it is, also at the edges of chunks and in an imaginary part."""
    dtype = getattr(torch, name)
    count = CHUNK // dtype.itemsize * 2 + 3
    tensor = torch.ones(count, dtype=dtype)
    assert is_finite(raw(tensor), dtype=name)
    parts = torch.view_as_real(tensor) if dtype.is_complex else tensor
    flat = parts.reshape(-1)
    for at in (0, 1, count // 2, CHUNK // dtype.itemsize - 1, CHUNK // dtype.itemsize, len(flat) - 1):
        before = flat[at].item()
        flat[at] = bad
        assert not is_finite(raw(tensor), dtype=name)
        flat[at] = before
    assert is_finite(raw(tensor), dtype=name)


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
def test_extremes_are_finite(name: str) -> None:
    """The largest, the smallest, denormal values and both zeros are healthy."""
    info = torch.finfo(getattr(torch, name))
    values = [info.max, info.min, info.tiny, -info.tiny, info.smallest_normal / 4, 0.0, -0.0, info.eps]
    assert is_finite(raw(torch.tensor(values, dtype=getattr(torch, name))), dtype=name)


@pytest.mark.parametrize("name", ["int64", "uint8", "bool", "bits8", "float4_e2m1fn_x2"])
def test_types_without_nan_are_finite(name: str) -> None:
    """Any bytes of a type that has no NaN are healthy."""
    assert is_finite(b"\xff" * 64, dtype=name)


def test_nothing_is_finite() -> None:
    """A tensor without values is healthy."""
    assert is_finite(b"", dtype="float32")


def test_torn_value_is_an_error() -> None:
    """Bytes that are no whole number of values are a fault of the plan, never called healthy."""
    with pytest.raises(ValueError, match="buffer size"):
        is_finite(b"123", dtype="float32")


def test_memory_beside_the_arena_is_small() -> None:
    """Looking at 64 MiB takes a few chunks of memory."""
    data = memoryview(bytearray(64 << 20))
    tracemalloc.start()
    assert is_finite(data, dtype="bfloat16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * CHUNK


def span(tensor: str, offset: int, *, role: str = "parameter", nbytes: int = 8) -> HealthSpan:
    """A span of two float32."""
    return HealthSpan(tensor=tensor, arena_offset=offset, nbytes=nbytes, dtype="float32", role=role)


def test_scan_names_what_is_not_finite() -> None:
    """Parameters and moments are told from buffers; a tensor in several pieces counts once."""
    arena = memoryview(np.array([1, 2, np.nan, 1, 1, np.inf, 1, 1], dtype=np.float32).tobytes())
    found = scan(
        [
            span("good", 0),
            span("bad", 8),
            span("bad", 16),
            span("moment", 16, role="moment"),
            span("buffer", 8, role="buffer"),
            span("fine", 24, role="buffer"),
        ],
        arena=arena,
    )
    assert found == Scan(state=frozenset({"bad", "moment"}), buffers=frozenset({"buffer"}))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["float32", "bfloat16", "int32"]),
            st.integers(0, 4),
            st.sampled_from([0, 0, 0, 4]),
            st.booleans(),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_spans_that_lie_together_are_told_apart(items: list[tuple[str, int, int, bool, bool]]) -> None:
    """However spans lie, with gaps or without: exactly those that hold a NaN are named, and gaps do not count."""
    arena, spans, state, buffers = bytearray(), [], set(), set()
    for number, (dtype, count, gap, bad, buffer) in enumerate(items):
        arena += b"\xff" * gap  # a NaN of every type
        value = np.float32(np.nan if bad else number).tobytes()
        data = (value if dtype != "bfloat16" else value[2:]) * count
        role = "buffer" if buffer else "moment"
        spans.append(
            HealthSpan(tensor=f"t{number}", arena_offset=len(arena), nbytes=len(data), dtype=dtype, role=role)
        )
        arena += data
        if bad and count and dtype != "int32":
            (buffers if buffer else state).add(f"t{number}")
    assert scan(spans, arena=memoryview(arena)) == Scan(state=frozenset(state), buffers=frozenset(buffers))


def test_span_outside_the_arena_is_an_error() -> None:
    """A plan that does not fit the arena is never called healthy."""
    with pytest.raises(ValueError, match="outside"):
        scan([span("w", 4)], arena=memoryview(bytes(8)))


def test_verdict_forgives_what_was_there_before() -> None:
    """Only a tensor that was finite where the attempt began makes a save unhealthy."""
    found = Scan(state=frozenset({"a", "b"}), buffers=frozenset({"c"}))
    assert not found.health(before=frozenset()).healthy
    assert not found.health(before=frozenset({"a"})).healthy
    verdict = found.health(before=frozenset({"a", "b", "z"}))
    assert verdict.healthy
    assert (verdict.nonfinite, verdict.nonfinite_buffers) == (("a", "b"), ("c",))
    assert Scan(state=frozenset(), buffers=frozenset({"c"})).health(before=frozenset()).healthy


def test_verdict_lists_a_hundred_names() -> None:
    """A manifest stays small even if everything is broken; the verdict counts all."""
    names = frozenset(f"w{i:03}" for i in range(150))
    verdict = Scan(state=names, buffers=names).health(before=frozenset(sorted(names)[:149]))
    assert not verdict.healthy
    assert len(verdict.nonfinite) == len(verdict.nonfinite_buffers) == health.NAMES


def test_neighbours_are_told_apart() -> None:
    """Small spans side by side are looked at together, and only what is not finite is named, in any order."""
    values = np.arange(3000, dtype="<f4")
    values[[7, 1500, 2999]] = [np.nan, np.inf, -np.inf]
    spans = [
        HealthSpan(tensor=str(at), arena_offset=4 * at, nbytes=4, dtype="float32", role=role)
        for at, role in enumerate(["parameter", "buffer", "moment"] * 1000)
    ]
    found = scan(reversed(spans), arena=memoryview(values.tobytes()))
    assert found == Scan(state=frozenset({"1500", "2999"}), buffers=frozenset({"7"}))


def test_neighbours_of_another_type_or_behind_a_gap_are_looked_at_by_themselves() -> None:
    """What lies between two spans belongs to none of them."""
    data = np.array([1, np.nan, 2], dtype="<f4").tobytes() + np.array([0x7F80_0000], dtype="<u4").tobytes()
    spans = [
        HealthSpan(tensor="a", arena_offset=0, nbytes=4, dtype="float32", role="parameter"),
        HealthSpan(tensor="b", arena_offset=8, nbytes=4, dtype="float32", role="parameter"),
        HealthSpan(tensor="c", arena_offset=12, nbytes=4, dtype="bfloat16", role="parameter"),
    ]
    assert scan(spans, arena=memoryview(data)).state == frozenset({"c"})
