"""Reading a folder of torch.distributed.checkpoint without running the code that may be in it.

Its `.metadata` is a pickle, which torch loads with Python's own unpickler: whoever can write the folder can run
code in whoever loads it. Here the unpickler knows a dozen names, and for each of them only a record that takes
what the pickle says of it; nothing is imported. The values are read by torch's unpickler for weights only.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from spotsafe.checkpoint import dtypes
from spotsafe.checkpoint.coverage import tiling_fault
from spotsafe.errors import UnsupportedState
from spotsafe.exchange.weights_only import load_weights_only
from spotsafe.tensors.memory import CPU
from spotsafe.tensors.tree import torch_dtype

METADATA = ".metadata"
MAX_METADATA = 1 << 30
"""Bytes of `.metadata` that are read at most."""

_CLASSES = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    (_CLASSES, name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
_NONSENSE = (
    pickle.UnpicklingError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError,
    EOFError, MemoryError,
)  # fmt: skip
"""What a file that torch did not write may lead to, at whatever place."""
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}


class Record:
    """What a pickle says of an object whose class is not imported."""

    kind = ""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.members: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.members = state if isinstance(state, dict) else {"state": state}

    def __getitem__(self, name: str) -> Any:
        try:
            return self.members[name]
        except KeyError:
            raise ValueError(f"a {self.kind} without {name!r}") from None


class _Unpickler(pickle.Unpickler):
    """Builds nothing but records, texts for dtypes, tuples and dicts."""

    def find_class(self, module: str, name: str) -> Any:
        """The little that a `.metadata` needs; see `pickle.Unpickler.find_class`.

        Raises:
            pickle.UnpicklingError: for everything else.
        """
        if (module, name) in _RECORDS or (module.partition(".")[0] == "pathlib" and name in _PATHS):
            return type(name, (Record,), {"kind": name})  # of its own, so that a pickle can change no other
        if module == "torch" and name == "Size":
            return tuple
        if module == "torch" and dtypes.find(name) is not None:
            return name
        if (module, name) == ("torch.serialization", "_get_layout"):
            return str
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"it wants to use {module}.{name}")


def is_dcp_folder(path: str) -> bool:
    """Whether a path is a folder that torch.distributed.checkpoint wrote."""
    return os.path.isfile(os.path.join(path, METADATA))


def read_dcp_folder(path: str) -> dict[str, Any]:
    """The state_dict that was saved in a folder of torch.distributed.checkpoint, nested as it was.

    Tensors that several ranks wrote in pieces are put together.

    Raises:
        UnsupportedState: it holds something that is not read because it could run code, or could not be trusted:
            the message says what.
        OSError: it could not be read.
    """
    file = os.path.join(path, METADATA)
    try:
        metadata = _read_metadata(file)
        storage = _places(metadata)
        mapping = metadata.members.get("planner_data") or {}
        nested: dict[str, Any] = {}
        for name, entry in _items(metadata["state_dict_metadata"]):
            value = _read_value(path, name, entry, storage.get(name, {}))
            _set(nested, mapping.get(name, (name,)), value)
        return {key: _lists(value) for key, value in nested.items()}
    except _NONSENSE as error:
        raise UnsupportedState(
            f"{file} is not read: {str(error) or type(error).__name__}. Only what torch.distributed.checkpoint "
            "itself writes is; nothing of it was executed",
            path=file,
        ) from error


def _read_metadata(file: str) -> Record:
    if os.path.getsize(file) > MAX_METADATA:
        raise ValueError(f"it has more than {MAX_METADATA} bytes")
    with open(file, "rb") as stream:
        found = _Unpickler(stream).load()
    if not isinstance(found, Record) or found.kind != "Metadata":
        raise ValueError("it holds no Metadata")
    return found


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if not isinstance(value, Mapping):
        raise TypeError(f"a {type(value).__name__} where a dict belongs")
    yield from value.items()


def _places(metadata: Record) -> dict[str, dict[tuple[int, ...] | None, Record]]:
    """Name -> offsets of a piece (None for what is no tensor) -> where it lies."""
    found: dict[str, dict[tuple[int, ...] | None, Record]] = {}
    for index, info in _items(metadata["storage_data"]):
        offset = index.members.get("offset")
        found.setdefault(index["fqn"], {})[None if offset is None else tuple(offset)] = info
    return found


def _read_value(folder: str, name: str, entry: Record, places: Mapping[Any, Record]) -> Any:
    if entry.kind == "BytesStorageMetadata":
        return _read_item(folder, name, places[None])
    shape = tuple(entry["size"])
    dtype = torch_dtype(entry["properties"]["state"][0])
    boxes = [(tuple(chunk["offsets"]), tuple(chunk["sizes"])) for chunk in entry["chunks"]]
    fault = tiling_fault(shape, boxes)
    if fault is not None:
        raise ValueError(f"{name}: {fault}")
    whole: torch.Tensor | None = None
    for offsets, lengths in boxes:
        piece = _read_item(folder, name, places[offsets] if offsets in places else places[None])
        if not isinstance(piece, torch.Tensor) or (tuple(piece.shape), piece.dtype) != (lengths, dtype):
            raise ValueError(f"{name}: a piece is not what {METADATA} says of it")
        if lengths == shape:
            return piece
        whole = torch.empty(shape, dtype=dtype, device=CPU) if whole is None else whole
        whole[tuple(map(slice, offsets, map(sum, zip(offsets, lengths, strict=True))))] = piece
    return torch.empty(shape, dtype=dtype, device=CPU) if whole is None else whole


def _read_item(folder: str, name: str, info: Record) -> Any:
    file = info["relative_path"]
    if not isinstance(file, str) or os.path.basename(file) != file or file in {"", ".", ".."}:
        raise ValueError(f"{name} lies in {file!r}, which is no file of this folder")
    if info.members.get("transform_descriptors"):
        raise ValueError(f"{name} is stored by an extension ({info['transform_descriptors']})")
    path, start, length = os.path.join(folder, file), int(info["offset"]), int(info["length"])
    if start < 0 or length < 0 or start + length > os.path.getsize(path):
        raise ValueError(f"{name} reaches outside of {file}")
    with open(path, "rb") as stream:
        stream.seek(start)
        return load_weights_only(io.BytesIO(stream.read(length)), name=f"{path}: {name}")


def _set(nested: dict[Any, Any], path: Any, value: Any) -> None:
    if not isinstance(path, tuple) or not path:
        raise TypeError("a path that is no tuple")
    for key in path[:-1]:
        nested = nested.setdefault(key, {})
    nested[path[-1]] = value


def _lists(value: Any) -> Any:
    """Dicts whose keys are 0, 1, 2, ... were lists: text is what the keys of a dict are turned into."""
    if type(value) is not dict:
        return value
    parts = {key: _lists(one) for key, one in value.items()}
    if parts and all(type(key) is int for key in parts) and sorted(parts) == list(range(len(parts))):
        return [parts[at] for at in range(len(parts))]
    return parts
