"""Writing a checkpoint as a file of another kind: safetensors, `torch.save`, or a folder of torch.distributed."""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import shutil
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from spotsafe.checkpoint import dtypes
from spotsafe.checkpoint.naming import module_entries, objects, reading_trees
from spotsafe.errors import StateMismatch, StorageError, StorageExists, UnsupportedState
from spotsafe.exchange.dcp_folder import is_dcp_folder
from spotsafe.exchange.optimizers import by_name, by_position, is_optimizer_tree, parts_of
from spotsafe.identity import new_nonce
from spotsafe.loading import Opened, decode
from spotsafe.storage.placing import place_new
from spotsafe.storage.writing import sync_folder
from spotsafe.tensors.tree import dtype_name

Form = Literal["safetensors", "pt", "dcp"]
_SHOWN = 10
_MOST_COPIES, _FREE_COPIES = 16, 1 << 28
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    path: str
    form: Form
    tensors: int
    left_out: tuple[str, ...]
    """Names of what is in the checkpoint, was asked for, and has no form in such a file."""


def form_of(path: str) -> Form:
    """What kind of file a name asks for.

    Raises:
        ValueError: none that is known, or not on this machine.
    """
    if "://" in path:
        raise ValueError(f"{path!r} is a url; export to a path of this machine, and copy the file")
    if path.endswith(".safetensors"):
        return "safetensors"
    if path.endswith((".pt", ".pth", ".bin")):
        return "pt"
    if path.endswith("/") or not os.path.splitext(path)[1]:
        return "dcp"
    raise ValueError(
        f"{path!r} says no kind of file: end it in .safetensors or .pt, or in / for a folder of "
        "torch.distributed.checkpoint"
    )


def export(opened: Opened, path: str, *, everything: bool = False, force: bool = False) -> Exported:
    """Write a checkpoint, or the weights in it, to a file or folder of this machine.

    The weights of one module go under the keys of its state_dict, so that `load_state_dict` takes them; those of
    several, and everything else, below the names under which they were tracked. `path` appears when it is whole.

    Args:
        opened: the checkpoint.
        path: its ending says what kind; see `form_of`.
        everything: all values that such a file can hold, not just the weights of modules.
        force: replace what is there.

    Raises:
        StateMismatch: it holds no module.
        UnsupportedState: a dtype or layout that a safetensors file cannot hold.
        StorageExists: there is something at `path`.
        StorageError: `path` cannot be written.
        DamagedCheckpoint: bytes differ from what was published.
    """
    form, path = form_of(path), path.rstrip("/")
    if os.path.lexists(path) and not force:
        raise StorageExists(f"{path} is there already; --force replaces it", path=path)
    with reading_trees(opened.name):
        values = _everything(opened, form) if everything else _weights(opened)
    kept, left_out = _held(values, tensors_only=form == "safetensors")
    tensors = dict(_tensors(kept))
    if form == "safetensors":
        _check_safetensors(tensors)
        _place(path, lambda temporary: _save_safetensors(tensors, temporary), force=force)
    elif form == "pt":
        _place(path, lambda temporary: torch.save(kept, temporary), force=force)
    else:
        _place(path, lambda temporary: _save_dcp(kept, temporary), force=force)
    return Exported(path=path, form=form, tensors=len(tensors), left_out=tuple(left_out))


# -- what is written ---------------------------------------------------------------------------------------------


def _objects(opened: Opened) -> dict[str, Mapping[str, Any]]:
    """The tracked objects by path; `contents` has seen that they can be read."""
    return dict(objects({name: tree for index in opened.indexes for name, tree in index.state.items()}))


def _weights(opened: Opened) -> dict[str, Any]:
    modules = _modules(_objects(opened))
    if not modules:
        raise StateMismatch(
            f"checkpoint {opened.name} holds no module, but {', '.join(_objects(opened)) or 'nothing'}; "
            "--all exports everything"
        )
    values = _nested(opened, modules)
    return values if len(modules) > 1 else dict(next(iter(values.values())))


def _modules(trees: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    found = ((path, module_entries(tree)) for path, tree in trees.items())
    return {path: entries for path, entries in found if entries is not None}


def _everything(opened: Opened, form: Form) -> dict[str, Any]:
    trees = _objects(opened)
    modules = _modules(trees)
    optimizers = {path: tree for path, tree in trees.items() if is_optimizer_tree(tree)}
    nodes = {} if opened.indexes[0].session is None else {"run": opened.indexes[0].session}
    for path, tree in trees.items():
        if path in optimizers:
            nodes[path] = parts_of(tree)
        elif path not in modules:
            nodes[path] = _state_of(tree)
    values = {**_nested(opened, modules), **decode(opened, nodes)}
    for path, tree in optimizers.items():
        if form == "pt":
            values[path] = by_position(tree["order"], values[path])
        else:
            values[path] = by_name(tree["order"], values[path], modules=list(modules))
    return values


def _state_of(tree: Mapping[str, Any]) -> Any:
    """What was saved of an object, without what says how."""
    for member in ("state", "value"):
        if member in tree:
            return tree[member]
    return {key: node for key, node in tree.items() if key != "kind"}


def _nested(opened: Opened, modules: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    flat = decode(
        opened, {f"{name}.{key}": node for name, entries in modules.items() for key, node in entries.items()}
    )
    return {
        name: OrderedDict((key, flat[f"{name}.{key}"]) for key in entries)
        for name, entries in modules.items()
    }


def _held(values: Mapping[str, Any], *, tensors_only: bool) -> tuple[dict[str, Any], list[str]]:
    """The values that a file can hold and every torch loads without trusting it, and the names of the others."""
    left_out: list[str] = []

    def keep(value: Any, path: str) -> tuple[bool, Any]:
        if type(value) in {dict, OrderedDict}:
            parts = [(key, keep(one, f"{path}.{key}" if path else str(key))) for key, one in value.items()]
            return True, {key: one for key, (good, one) in parts if good}
        if isinstance(value, torch.Tensor) or (not tensors_only and _is_plain(value)):
            return True, value
        left_out.append(path)
        return False, None

    _, kept = keep(dict(values), "")
    return kept, left_out


def _is_plain(value: Any) -> bool:
    if type(value) in {list, tuple, set}:
        return all(map(_is_plain, value))
    if type(value) in {dict, OrderedDict, Counter}:
        return all(_is_plain(key) and _is_plain(one) for key, one in value.items())
    return isinstance(value, torch.Tensor) or type(value) in _PLAIN


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _tensors(one, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for at, one in enumerate(value):
            yield from _tensors(one, f"{path}.{at}")


# -- how -----------------------------------------------------------------------------------------------------------


def _check_safetensors(tensors: Mapping[str, torch.Tensor]) -> None:
    problems = []
    for name, tensor in tensors.items():
        info = dtypes.find(dtype_name(tensor.dtype))
        if tensor.layout is not torch.strided:
            problems.append(f"{name} ({str(tensor.layout).removeprefix('torch.')})")
        elif info is None or info.trailing:
            problems.append(f"{name} ({dtype_name(tensor.dtype)})")
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise UnsupportedState(
            f"a safetensors file cannot hold {', '.join(problems[:_SHOWN])}{more}; export to .pt instead",
            path=problems[0].partition(" ")[0],
        )


def _save_safetensors(tensors: Mapping[str, torch.Tensor], path: str) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415 - only this kind of export pays for it

    _check_ties(tensors.values())
    seen: set[int] = set()
    own = {}
    for name, tensor in tensors.items():  # tied tensors are written under each of their names
        own[name] = tensor.clone() if tensor.data_ptr() in seen and tensor.numel() else tensor.contiguous()
        seen.add(tensor.data_ptr())
    save_file(own, path, metadata={"format": "pt"})


def _check_ties(tensors: Iterable[torch.Tensor]) -> None:
    """A checkpoint may name one tensor a million times, and each name is a copy in the file."""
    found = list(tensors)
    stored = sum({tensor.data_ptr(): tensor.nbytes for tensor in found}.values())
    written = sum(tensor.nbytes for tensor in found)
    if written > _MOST_COPIES * stored + _FREE_COPIES:
        raise UnsupportedState(
            f"a safetensors file has tied tensors under each of their names, here {written:,} bytes for "
            f"{stored:,}; export to .pt instead"
        )


def _save_dcp(values: dict[str, Any], path: str) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: PLC0415 - half a second
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415 - half a second that only this form needs

    alone = (
        {"no_dist": True} if "no_dist" in inspect.signature(save).parameters else {}
    )  # not before torch 2.6
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is what is meant
        save(values, storage_writer=FileSystemWriter(path), **alone)


def _place(path: str, write: Callable[[str], object], *, force: bool) -> None:
    """Write beside `path` and rename: a reader finds nothing there, or all of it."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise StorageError(f"{path} cannot be written: there is no folder {folder}; make it first", path=path)
    temporary = os.path.join(folder, f".{os.path.basename(path)}.{new_nonce()}.tmp")
    try:
        write(temporary)
        _sync(temporary)
        if os.path.isdir(temporary):
            _place_folder(temporary, path, force=force)
        elif force:
            os.replace(temporary, path)
        else:
            place_new(temporary, path)
        sync_folder(folder)
    except OSError as error:
        if error.errno in {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}:
            raise StorageExists(f"{path} is there already, and was left as it is", path=path) from error
        raise StorageError(f"{path} cannot be written: {error}", path=path) from error
    finally:
        _remove(temporary)


def _place_folder(temporary: str, path: str, *, force: bool) -> None:
    aside = f"{temporary}.old"
    if force and is_dcp_folder(path):  # nothing else is ever replaced by a folder
        os.rename(path, aside)
    try:
        os.rename(temporary, path)
    except OSError:
        if os.path.isdir(aside):
            os.rename(aside, path)
        raise
    _remove(aside)


def _sync(path: str) -> None:
    files = [os.path.join(path, name) for name in os.listdir(path)] if os.path.isdir(path) else [path]
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    if os.path.isdir(path):
        sync_folder(path)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
