"""Values of a checkpoint into tensors that the program holds, also where torch's `copy_` does not reach."""

from __future__ import annotations

import functools
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from spotsafe.tensors.memory import CPU
from spotsafe.tensors.tree import COMPRESSED, is_wrapper, overlaps_itself


def copy_into(live: torch.Tensor, saved: torch.Tensor) -> None:
    """Give `live` the values of `saved`, which has the same shape; dtypes and devices are converted.

    Raises:
        RuntimeError: torch cannot do it.
    """
    with torch.no_grad():
        if live.layout in COMPRESSED and live.layout is saved.layout:
            live.resize_as_sparse_(saved)
        if live.dtype is saved.dtype and not has_copy(live.dtype):
            live, saved = live.view(torch.uint8), saved.view(torch.uint8)
        live.copy_(saved)


@functools.cache
def has_copy(dtype: torch.dtype) -> bool:
    """Whether torch can copy values of this dtype; of integers with less than 8 bits it can not."""
    try:
        torch.empty(1, dtype=dtype, device=CPU).copy_(torch.empty(1, dtype=dtype, device=CPU))
    except RuntimeError:  # NotImplementedError is one
        return False
    return True


@functools.cache
def has_casts(dtype: torch.dtype) -> bool:
    """Whether torch can make floats of values of this dtype."""
    try:
        torch.empty(1, dtype=dtype, device=CPU).to(torch.float32)
    except RuntimeError:
        return False
    return True


def spread_buffers(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Give expanded buffers memory for each of their elements: torch cannot load into them otherwise."""
    for full, buffer in list(module.named_buffers(remove_duplicate=False)):
        if full in state and overlaps_itself(buffer):
            prefix, _, name = full.rpartition(".")
            setattr(module.get_submodule(prefix), name, buffer.clone(memory_format=torch.contiguous_format))


def write_unusual(module: nn.Module, state: MutableMapping[str, Any]) -> None:
    """Write what torch's own `load_state_dict` has no way to copy.

    It stands in `state` as the live tensor itself then: copying that onto itself is nothing.

    Raises:
        RuntimeError: torch cannot do it.
    """
    unusual = [key for key, value in state.items() if isinstance(value, torch.Tensor) and _is_unusual(value)]
    for key in unusual:
        prefix, _, name = key.rpartition(".")
        live = getattr(module.get_submodule(prefix), name, None)
        if isinstance(live, torch.Tensor) and _fits(live, state[key]):
            copy_into(live, state[key])
            state[key] = live


def _is_unusual(value: torch.Tensor) -> bool:
    return value.layout in COMPRESSED or not has_copy(value.dtype)


def _fits(live: torch.Tensor, saved: torch.Tensor) -> bool:
    same = (live.shape, live.dtype, live.layout) == (saved.shape, saved.dtype, saved.layout)
    return same and not is_wrapper(live)
