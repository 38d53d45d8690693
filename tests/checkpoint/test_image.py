"""File images: what the real safetensors library opens, and what damage of a header looks like."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st

from spotsafe.checkpoint import dtypes
from spotsafe.checkpoint.image import PAGE, FileImage, ImageTensor, header_bytes, parse_header, plan_image
from spotsafe.errors import DamagedCheckpoint

dims = st.lists(st.integers(0, 4), max_size=4).map(tuple)
specs = st.dictionaries(
    st.text(min_size=1, max_size=12).filter(lambda key: key != "__metadata__"),
    st.tuples(st.sampled_from(sorted(dtypes.DTYPES)), dims),
    max_size=12,
)


def planned(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> FileImage:
    """The image of tensors of torch dtypes."""
    return plan_image(
        ImageTensor.of(key, dtype=dtypes.DTYPES[name], shape=shape) for key, (name, shape) in tensors.items()
    )


def file_of(image: FileImage, contents: dict[str, bytes]) -> bytes:
    """The file itself."""
    data = bytearray(image.header.ljust(image.size, b"\xaa"))
    for key, start in image.starts.items():
        data[start : start + len(contents[key])] = contents[key]
    return bytes(data)


def test_numpy_arrays_come_back_through_the_real_library(tmp_path: Path) -> None:
    """Every dtype that numpy shares, 0 dimensions, empty tensors, odd sizes."""
    floats = [f"float{bits}" for bits in (16, 32, 64)]
    kinds = [*floats, "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]
    shapes = [(), (0,), (3, 0, 2), (1,), (5,), (3, 7)]
    arrays = {
        f"{kind}.{number}": np.arange(math.prod(shape)).reshape(shape).astype(kind)
        for kind in kinds
        for number, shape in enumerate(shapes)
    }
    image = planned({key: (str(array.dtype), array.shape) for key, array in arrays.items()})
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(image, {key: array.tobytes() for key, array in arrays.items()}))
    loaded = safetensors.numpy.load_file(path)
    assert loaded.keys() == arrays.keys()
    for key, array in arrays.items():
        assert loaded[key].dtype == array.dtype
        np.testing.assert_array_equal(loaded[key], array)


@pytest.mark.parametrize("name", sorted(dtypes.DTYPES))
def test_every_dtype_opens_in_the_real_library(name: str, tmp_path: Path) -> None:
    """What safetensors has no word for is there as bytes, and one tensor of it does not spoil the file."""
    info = dtypes.DTYPES[name]
    content = bytes(value % 2 for value in range(6 * info.item_bytes))
    image = planned({"w": (name, (2, 3)), "other": ("float32", (1,))})
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(image, {"w": content, "other": bytes(4)}))
    with safetensors.safe_open(path, framework="pt") as file:
        loaded = file.get_tensor("w")
    assert tuple(loaded.shape) == info.stored_shape((2, 3))
    assert loaded.dtype == (torch.uint8 if info.trailing else getattr(torch, name))
    assert bytes(loaded.reshape(-1).view(torch.uint8).numpy()) == content


@pytest.mark.slow
@given(specs)
@settings(max_examples=100)
def test_any_plan_opens_and_is_laid_out_as_promised(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Padding, order, alignment, and our own reading of the header."""
    image = planned(tensors)
    assert len(image.header) % PAGE == 0
    order = sorted(tensors, key=lambda key: (-dtypes.DTYPES[tensors[key][0]].item_bytes, key))
    assert list(image.starts) == order
    for key, start in image.starts.items():
        assert start % dtypes.DTYPES[tensors[key][0]].item_bytes == 0
    contents = {key: bytes(math.prod(s) * dtypes.DTYPES[n].item_bytes) for key, (n, s) in tensors.items()}
    data = file_of(image, contents)
    assert len(data) == image.size
    opened = safetensors.deserialize(data)
    assert {key for key, _ in opened} == tensors.keys()
    stored = parse_header(data, file_size=image.size)
    assert {key: entry.start for key, entry in stored.items()} == image.starts
    assert {key: entry.nbytes for key, entry in stored.items()} == {k: len(c) for k, c in contents.items()}
    for key, entry in opened:
        assert (stored[key].dtype_code, list(stored[key].shape)) == (entry["dtype"], entry["shape"])


@given(specs, st.randoms())
@settings(max_examples=50)
def test_equal_content_gives_equal_bytes(tensors: dict[str, Any], random: Any) -> None:
    """Whatever the order in which the tensors are given."""
    items = list(tensors.items())
    random.shuffle(items)
    assert planned(tensors) == planned(dict(items))


def test_a_thousand_tensors_open(tmp_path: Path) -> None:
    """A header of many pages; the data begins at a page."""
    tensors = {f"layers.{number}.weight": ("bfloat16", (3,)) for number in range(1000)}
    image = planned(tensors)
    assert len(image.header) > 10 * PAGE
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(image, {key: bytes(6) for key in tensors}))
    assert safetensors.torch.load_file(path).keys() == tensors.keys()


def test_a_file_without_tensors_opens(tmp_path: Path) -> None:
    """One page of header."""
    image = planned({})
    assert (image.size, len(image.header), dict(image.starts)) == (PAGE, PAGE, {})
    path = tmp_path / "x.safetensors"
    path.write_bytes(image.header)
    assert safetensors.torch.load_file(path) == {}
    assert parse_header(image.header, file_size=PAGE) == {}


def test_the_header_ends_exactly_at_a_page() -> None:
    """The length field counts: sizes around the edge are padded to the edge, never one byte beyond."""
    sizes = {len(planned({"k" * n: ("uint8", (1,))}).header) for n in range(4000, 4100)}
    assert sizes == {PAGE, 2 * PAGE}


def tensor(**changes: Any) -> ImageTensor:
    """A proper tensor, changed."""
    return ImageTensor(**{"key": "w", "dtype_code": "F32", "shape": (2,), "nbytes": 8, **changes})


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ([tensor(), tensor()], "two tensors named 'w'"),
        ([tensor(key="__metadata__")], "escape"),
        ([tensor(key="")], "escape"),
        ([tensor(nbytes=7)], "7 bytes"),
        ([tensor(shape=(-2, -1))], "negative"),
        ([tensor(dtype_code="C64")], "C64"),
        ([tensor(key="\ud800")], "surrogate"),
    ],
)
def test_what_no_reader_would_open_is_not_planned(tensors: list[ImageTensor], says: str) -> None:
    """A mistake of the caller is found before a byte is written."""
    with pytest.raises(ValueError, match=says):
        plan_image(tensors)


def test_a_header_that_readers_refuse_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Safetensors stops at 100 MB of header."""
    monkeypatch.setattr("spotsafe.checkpoint.image.MAX_HEADER", PAGE)
    with pytest.raises(ValueError, match="more files"):
        planned({f"w{number}": ("int8", (1,)) for number in range(200)})


def header_file(header: Any, data: bytes = b"") -> bytes:
    """A file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, **changes: Any) -> dict[str, Any]:
    """A header's entry of bytes, changed."""
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end], **changes}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no safetensors header"),
        (b"\x02\0\0\0\0\0\0", "no safetensors header"),
        (bytes(8), "no safetensors header"),
        (b"\xff" * 8, "a header of"),
        ((100).to_bytes(8, "little") + b"{}", "in a file of 10"),
        (header_file(b"[]"), "JSON object"),
        (header_file(b"{,"), "not JSON"),
        (header_file(b'{"a":1,"a":1}'), "same key"),
        (header_file({"a": 1}), "not an object"),
        (header_file({"a": entry(0, 2, dtype="F4")}, bytes(2)), "unknown dtype"),
        (header_file({"a": entry(0, 2, dtype=["U8"])}, bytes(2)), "unknown dtype"),
        (header_file({"a": entry(0, 2, shape=[3])}, bytes(2)), "2 bytes"),
        (header_file({"a": entry(0, 2, shape=[-2])}, bytes(2)), "proper shape"),
        (header_file({"a": entry(0, 2, shape=[True, 2])}, bytes(2)), "proper shape"),
        (header_file({"a": entry(0, 2, shape=[2.0])}, bytes(2)), "proper shape"),
        (header_file({"a": entry(0, 2, data_offsets=[0])}, bytes(2)), "proper shape"),
        (header_file({"a": {"dtype": "U8"}}, bytes(2)), "proper shape"),
        (header_file({"a": entry(0, 1, shape=[1] * 65)}, bytes(1)), "proper shape"),
        (header_file({"a": entry(0, 2), "b": entry(1, 3)}, bytes(3)), "'b' starts at"),
        (header_file({"a": entry(0, 2), "b": entry(3, 4)}, bytes(4)), "'b' starts at"),
        (header_file({"a": entry(0, 2), "b": entry(0, 2)}, bytes(4)), "starts at"),
        (header_file({"a": entry(0, 2)}, bytes(3)), "end at byte"),
        (header_file({"a": entry(0, 2)}, bytes(1)), "end at byte"),
        (header_file({"a": entry(0, 1 << 63)}, bytes(1)), "proper shape"),
    ],
)
def test_a_header_that_no_plan_makes_is_damage(data: bytes, says: str) -> None:
    """Bounds, gaps, overlaps, duplicates, kinds: each with its reason."""
    with pytest.raises(DamagedCheckpoint, match=says) as caught:
        parse_header(data, file_size=len(data), checkpoint="c", file="data-00000-000.safetensors")
    assert caught.value.file == "data-00000-000.safetensors"


def test_a_header_that_was_read_in_part_is_damage() -> None:
    """The caller learns the length from the first 8 bytes."""
    image = planned({"w": ("float32", (2,))})
    assert header_bytes(image.header[:8], file_size=image.size) == len(image.header)
    with pytest.raises(DamagedCheckpoint, match="ends after 100"):
        parse_header(image.header[:100], file_size=image.size)


def test_metadata_of_other_writers_is_passed_over() -> None:
    """It is part of the safetensors format, though we write none."""
    data = header_file({"__metadata__": {"by": "x"}, "a": entry(0, 2)}, bytes(2))
    assert list(parse_header(data, file_size=len(data))) == ["a"]


@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 255))
@settings(max_examples=200)
def test_damaged_headers_are_damage_and_nothing_else(data: bytes, position: int, value: int) -> None:
    """Random files, and a good one with a byte changed."""
    image = planned({"a": ("float32", (2,)), "b": ("bool", ())})
    changed = bytearray(image.header + bytes(9))
    changed[position] = value
    for file in (data, bytes(changed)):
        try:
            parse_header(file, file_size=len(file))
        except DamagedCheckpoint:
            continue
