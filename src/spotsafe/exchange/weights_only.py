"""torch.load as far as it can be trusted: weights and plain values, never classes or functions of a file."""

from __future__ import annotations

import io
import pickle
import re
import warnings
from typing import Any

import torch

from spotsafe.errors import UnsupportedState

SAFE_SINCE = (2, 6)
"""Before, a file could run code in spite of `weights_only=True` (CVE-2025-32434)."""

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
"""How torch names what a file wanted to use."""


def load_weights_only(source: str | io.BytesIO, *, name: str) -> Any:
    """What a file of `torch.save` holds, on the CPU.

    Args:
        source: the file's path, or its bytes.
        name: what to call it in an error.

    Raises:
        UnsupportedState: it holds more than tensors and plain values, or this torch cannot be trusted with it.
        OSError: it could not be read.
    """
    if _version() < SAFE_SINCE:
        raise UnsupportedState(
            f"torch {torch.__version__} runs code that a hostile {name} may hold; use torch 2.6 or newer, or a "
            "safetensors file",
            path=name,
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # it is tried all the same
            return torch.load(source, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise UnsupportedState(
            f"{name} is not read: {_reason(error)}. Nothing of it was executed", path=name
        ) from error


def _reason(error: Exception) -> str:
    """In a sentence; torch's own text advises to switch the protection off, or is a bare number."""
    used = _GLOBAL.search(str(error))
    if used is not None:
        return (
            f"it uses {used[1]}, and only tensors and plain values are read. Save it again with the state_dict() of "
            "what is in it, names and numbers"
        )
    if isinstance(error, pickle.UnpicklingError):
        return "it is damaged, no file of torch.save, or holds more than tensors and plain values"
    return "it is damaged, or no file of torch.save"


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
