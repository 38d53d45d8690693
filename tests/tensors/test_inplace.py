"""Copying into live tensors, also where torch has no copy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spotsafe.tensors.inplace import copy_into, has_casts, has_copy, spread_buffers, write_unusual


def test_which_dtypes_torch_copies() -> None:
    """If torch learns the others, this tells, and they need no way of their own any more."""
    assert all(map(has_copy, (torch.float32, torch.uint64, torch.bits8, torch.float4_e2m1fn_x2)))
    assert not any(map(has_copy, (torch.int4, torch.uint1)))
    assert has_casts(torch.float8_e5m2)
    assert not any(map(has_casts, (torch.uint4, torch.float4_e2m1fn_x2)))


def test_a_copy_keeps_the_tensor_and_its_place_in_autograd() -> None:
    """The live tensor is the same object, in the same memory; other dtypes are converted."""
    live = torch.zeros(2, requires_grad=True)
    memory = live.data_ptr()
    copy_into(live, torch.tensor([1, 2]))
    assert live.tolist() == [1, 2]
    assert (live.data_ptr(), live.requires_grad, live.is_leaf) == (memory, True, True)


def test_a_copy_that_torch_refuses_is_an_error() -> None:
    """Integers of four bits have no conversion."""
    with pytest.raises(RuntimeError):
        copy_into(torch.zeros(1), torch.zeros(1, dtype=torch.uint8).view(torch.int4))


def test_only_what_is_unusual_is_written_before_the_load() -> None:
    """The rest is the module's own to load; what does not fit is left to it to refuse."""
    module = nn.Module()
    module.register_buffer("codes", torch.zeros(3, dtype=torch.uint8).view(torch.uint4))
    module.register_buffer("other", torch.zeros(2, dtype=torch.uint8).view(torch.uint4))
    module.register_buffer("plain", torch.zeros(3))
    saved = torch.arange(3, dtype=torch.uint8).view(torch.uint4)
    state = {"codes": saved, "other": saved, "plain": torch.ones(3), "missing.codes": 1}
    write_unusual(module, state)
    assert state["codes"] is module.codes
    assert module.codes.view(torch.uint8).tolist() == [0, 1, 2]
    assert state["other"] is saved
    assert module.plain.tolist() == [0, 0, 0]


def test_expanded_buffers_get_memory() -> None:
    """Only those that are loaded."""
    module = nn.Module()
    module.inner = nn.Module()
    module.inner.register_buffer("one", torch.zeros(1).expand(3))
    module.register_buffer("two", torch.zeros(1).expand(3), persistent=False)
    spread_buffers(module, {"inner.one": torch.ones(3)})
    assert module.inner.one.stride() == (1,)
    assert module.two.stride() == (0,)
