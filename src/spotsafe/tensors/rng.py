"""The random number generators of the process, as one value that is cheap to take at every step.

Python's `random`, numpy's legacy global, torch's CPU generator and those of all CUDA devices. The same codec
serves single generators that a user tracks.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from spotsafe.errors import StateMismatch, UnsupportedState

Json = Any
"""A value that `json` can write."""

_MT19937_BYTES: Final = 625 * 4
"""numpy's `mt19937_state`: 624 words and the position."""
_GLOBAL: Final[np.random.RandomState] = np.random.get_state.__self__  # type: ignore[attr-defined] # a bound method
_seen = threading.local()


@dataclass(frozen=True, slots=True, kw_only=True)
class RngSnapshot:
    """The state of every generator at one instant. Nothing in it changes later."""

    python: tuple[Any, ...]
    numpy: Mapping[str, Any]
    torch_cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...] = ()
    """One for each device; empty when CUDA was not in use."""

    def to_state(self) -> Json:
        """The snapshot as JSON."""
        return {
            "python": encode_python(self.python),
            "numpy": encode_bits(self.numpy),
            "torch": encode_bytes(self.torch_cpu),
            "cuda": [encode_bytes(state) for state in self.cuda],
        }

    @staticmethod
    def from_state(state: Json) -> RngSnapshot:
        """Read what `to_state` made.

        Raises:
            ValueError: it is not such a state.
        """
        try:
            return RngSnapshot(
                python=decode_python(state["python"]),
                numpy=decode_numpy(state["numpy"]),
                torch_cpu=decode_bytes(state["torch"], size=torch.default_generator.get_state().numel()),
                cuda=tuple(decode_bytes(text) for text in state["cuda"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a state of random number generators: {error}") from error

    def restore(self) -> None:
        """Set every generator. CUDA devices that the machine does not have are left out.

        Raises:
            StateMismatch: a generator does not take its state.
        """
        try:
            random.setstate(self.python)
            np.random.set_state(dict(self.numpy))
            torch.default_generator.set_state(self.torch_cpu)
        except (TypeError, ValueError, OverflowError, LookupError, RuntimeError) as error:
            problem = f"run.rng: no proper state of random number generators: {error}"
            raise StateMismatch(problem, problems=[problem]) from error
        if self.cuda and torch.cuda.is_available():
            for device, state in enumerate(self.cuda[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, device)


def capture_rng() -> RngSnapshot:
    """Take the state of every generator; some microseconds."""
    return RngSnapshot(
        python=random.getstate(),
        numpy=_numpy_global(),
        torch_cpu=torch.default_generator.get_state(),
        cuda=_cuda_states(),
    )


def _cuda_states() -> tuple[torch.Tensor, ...]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch left it unannotated
        return ()
    return tuple(generator.get_state() for generator in torch.cuda.default_generators)


def _numpy_global() -> Mapping[str, Any]:
    """The state of numpy's global generator.

    `get_state` boxes 624 words, which takes longer than everything else here together. Most programs never
    draw from this generator between two steps. So the bytes of its words and of the object (which hold the
    cached normal deviate) are compared with those of the last call, and only a difference is paid for.
    """
    bits = _GLOBAL._bit_generator  # noqa: SLF001 - the only way to its memory
    if not isinstance(bits, np.random.MT19937):
        return _GLOBAL.get_state(legacy=False)
    memory = (
        ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES),
        ctypes.string_at(id(_GLOBAL), type(_GLOBAL).__basicsize__),
    )
    last = getattr(_seen, "numpy", None)
    if last is not None and last[0] == memory:
        state: Mapping[str, Any] = last[1]
        return state
    state = _GLOBAL.get_state(legacy=False)
    _seen.numpy = (memory, state)
    return state


# Codecs. What is no state of a generator makes a `decode` raise ValueError, TypeError, KeyError or AttributeError.


def encode_bytes(tensor: torch.Tensor) -> str:
    """A byte tensor as text."""
    return base64.b64encode(tensor.cpu().numpy().tobytes()).decode("ascii")


def decode_bytes(text: Json, *, size: int | None = None) -> torch.Tensor:
    """The byte tensor of `encode_bytes`, of `size` bytes if given."""
    data = _from_base64(text)
    if not data or (size is not None and len(data) != size):
        raise ValueError(f"a generator's state has {len(data)} bytes, expected {size or 'some'}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def encode_python(state: tuple[Any, ...]) -> Json:
    """The state of a `random.Random`."""
    version, words, gauss = state
    packed = np.array(words, dtype="<u4").tobytes()
    return {"version": version, "words": base64.b64encode(packed).decode("ascii"), "gauss": gauss}


def decode_python(node: Json) -> tuple[Any, ...]:
    """The tuple that `random.Random.setstate` takes."""
    words = np.frombuffer(_from_base64(node["words"]), dtype="<u4")
    gauss = node["gauss"]
    if node["version"] != 3 or words.size != 625 or not (gauss is None or isinstance(gauss, float)):
        raise ValueError("not the state of python's random")
    return (3, tuple(int(word) for word in words), gauss)


def encode_bits(state: object) -> Json:
    """The state of a numpy bit generator: nested dicts of names, whole numbers, floats and arrays of words."""
    if isinstance(state, Mapping):
        return {str(key): encode_bits(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        little = state.astype(state.dtype.newbyteorder("<"))
        return {"dtype": state.dtype.name, "words": base64.b64encode(little.tobytes()).decode("ascii")}
    if isinstance(state, (np.integer, np.floating)):
        return state.item()
    if state is None or isinstance(state, (str, int, float)):
        return state
    raise UnsupportedState(f"a numpy generator's state holds a {type(state).__name__}, which cannot be saved")


def decode_bits(node: Json) -> Any:
    """What `encode_bits` took."""
    if not isinstance(node, Mapping):
        return node
    if node.keys() != {"dtype", "words"}:
        return {key: decode_bits(value) for key, value in node.items()}
    if node["dtype"] not in {"uint8", "uint32", "uint64"}:
        raise ValueError(f"words of a generator cannot be {node['dtype']!r}")
    dtype = np.dtype(node["dtype"])
    return np.frombuffer(_from_base64(node["words"]), dtype=dtype.newbyteorder("<")).astype(dtype)


def decode_numpy(node: Json) -> Mapping[str, Any]:
    """The state of a numpy `RandomState`, proved by setting it in a generator of the same kind.

    numpy itself does not check the position inside the words: one out of bounds reads foreign memory.
    """
    state: Mapping[str, Any] = decode_bits(node)
    if state["bit_generator"] == "MT19937":
        check_mt19937(state)
    return state


def check_mt19937(state: Mapping[str, Any]) -> None:
    """Raise ValueError unless key and position are those of a Mersenne Twister."""
    key, position = state["state"]["key"], state["state"]["pos"]
    whole = isinstance(key, np.ndarray) and key.dtype == np.uint32 and key.shape == (624,)
    if not whole or not isinstance(position, int) or not 0 <= position <= 624:
        raise ValueError("not the state of a Mersenne Twister")


def _from_base64(text: Json) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"a generator's state is no base64: {error}") from error
