"""The table of dtypes against torch itself, and against what safetensors opens."""

from __future__ import annotations

import pytest
import torch

from spotsafe.checkpoint import dtypes
from spotsafe.errors import UnsupportedState

OF_TORCH = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


@pytest.mark.parametrize("name", sorted(OF_TORCH))
def test_every_dtype_of_torch_is_known_with_its_size_or_refused_as_quantized(name: str) -> None:
    """A new dtype of torch makes this fail, so that somebody decides how it is stored."""
    info = dtypes.find(name)
    if info is None:
        with pytest.raises(UnsupportedState, match=r"w\.x is a quantized tensor .*int_repr"):
            dtypes.require(name, path="w.x")
        return
    assert dtypes.require(name, path="w.x") is info
    assert info.name == name
    assert info.item_bytes == OF_TORCH[name].itemsize


@pytest.mark.parametrize("info", dtypes.DTYPES.values(), ids=lambda info: info.name)
def test_the_stored_shape_makes_the_bytes(info: dtypes.DtypeInfo) -> None:
    """Items of the code times the stored shape are the bytes of the tensor."""
    shape = info.stored_shape((2, 3))
    items = 1
    for length in shape:
        items *= length
    assert items * dtypes.CODE_BYTES[info.code] == 6 * info.item_bytes
    assert shape == ((2, 3, info.item_bytes) if info.trailing else (2, 3))
    assert info.trailing == (info.code == "U8" and info.name != "uint8")


def test_a_dtype_of_the_future_is_refused_with_a_way_out() -> None:
    """Guessing its size would be worse."""
    with pytest.raises(UnsupportedState, match=r"w has dtype float2, .*uint8") as caught:
        dtypes.require("float2", path="w")
    assert caught.value.path == "w"
    assert dtypes.find("float2") is None
