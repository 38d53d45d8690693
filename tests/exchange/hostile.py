"""Files that run code when Python's unpickler reads them: each touches a marker file."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, save


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.command = f"touch {marker}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def payloads(marker: Path) -> Iterator[tuple[str, Any]]:
    """The same attack at several places of a value."""
    yield "alone", Payload(marker)
    yield "in a dict", {"w": torch.ones(1), "x": Payload(marker)}
    yield "deep", {"model": {"w": torch.ones(1)}, "extra": [({"a": Payload(marker)},)]}
    yield "as a key", {(1, Payload(marker)): 1}


def pt_files(folder: Path, marker: Path) -> Iterator[Path]:
    """Files of `torch.save`: in today's form, in the old one, and a bare pickle."""
    forms: dict[str, Callable[[Any, Path], object]] = {
        "zip": torch.save,
        "old": lambda value, path: torch.save(value, path, _use_new_zipfile_serialization=False),
        "bare": lambda value, path: path.write_bytes(pickle.dumps(value)),
    }
    for form, write in forms.items():
        for place, value in payloads(marker):
            path = folder / f"{form} {place}.pt"
            write(value, path)
            yield path


def dcp_folder(folder: Path, values: dict[str, Any] | None = None) -> Path:
    """A good folder of torch.distributed.checkpoint."""
    save(
        values or {"model": {"w": torch.ones(2)}, "step": 5},
        storage_writer=FileSystemWriter(folder),
        no_dist=True,
    )
    return folder


def change_metadata(folder: Path, change: Callable[[Any], Any]) -> None:
    """Replace what the `.metadata` holds."""
    path = folder / ".metadata"
    path.write_bytes(pickle.dumps(change(pickle.loads(path.read_bytes()))))


def dcp_folders(folder: Path, marker: Path) -> Iterator[Path]:
    """Folders with the payload in the metadata, at several places, and in a value."""

    def planner(metadata: Any) -> Any:
        metadata.planner_data["model.w"] = Payload(marker)
        return metadata

    def version(metadata: Any) -> Any:
        metadata.version = Payload(marker)
        return metadata

    def dtype(metadata: Any) -> Any:
        metadata.state_dict_metadata["model.w"].properties.dtype = Payload(marker)
        return metadata

    changes = {"planner": planner, "version": version, "dtype": dtype, "all": lambda _: Payload(marker)}
    for name, change in changes.items():
        one = dcp_folder(folder / name)
        change_metadata(one, change)
        yield one
    yield with_value(folder / "value", Payload(marker))


def with_value(folder: Path, value: Any) -> Path:
    """A folder in which `step` is this value."""
    dcp_folder(folder)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    (folder / "evil.distcp").write_bytes(buffer.getvalue())

    def point(metadata: Any) -> Any:
        for index, info in metadata.storage_data.items():
            if index.fqn == "step":
                info.relative_path, info.offset, info.length = "evil.distcp", 0, len(buffer.getvalue())
        return metadata

    change_metadata(folder, point)
    return folder
