"""Memory of this machine for tensors, whatever `torch.set_default_device` says, and the copying of a few bytes."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch

CPU: Final = torch.device("cpu")
SMALL: Final = 1 << 14
"""Bytes up to which calls of torch cost more than the copy."""
MANY: Final = 4
"""From so many tensors of one dtype and shape on, one call for all of them costs less than one for each."""
AT_ONCE: Final = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    }
)
"""Dtypes of which one call of torch copies many tensors, bit for bit. Bytes of a bool are not only 0 and 1."""

copy_bytes = ctypes.PyDLL(
    None
).memmove  # keeps the interpreter's lock, unlike `ctypes.memmove`: that costs more
"""Copy between addresses: to, from, bytes."""
copy_bytes.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
copy_bytes.restype = ctypes.c_void_p


def new_bytes(count: int) -> torch.Tensor:
    """So many bytes, not set to anything.

    Raises:
        RuntimeError: there is not enough memory, as torch says it; see `checkpoint.room.room_for`.
    """
    return torch.empty(count, dtype=torch.uint8, device=CPU)


def view_of(data: torch.Tensor) -> memoryview:
    """The memory of bytes of this machine."""
    array: Any = data.numpy()
    return memoryview(array)
