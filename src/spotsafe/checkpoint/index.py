"""The index: what one rank wrote. Slices of tensors in files, digests of the files, and typed state."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

import msgspec

from spotsafe.checkpoint import dtypes, strict_json
from spotsafe.checkpoint.digest import ALGORITHM
from spotsafe.checkpoint.index_check import (
    check_files,
    check_index,
    check_references,
    check_tensors,
    tiling_problem,
)
from spotsafe.checkpoint.index_document import Document, read_document
from spotsafe.checkpoint.index_values import ROLES, FileEntry, Index, Slice, TensorEntry
from spotsafe.checkpoint.versions import (
    check_references_required,
    members_of_version,
    unsupported,
)
from spotsafe.errors import DamagedCheckpoint, UnsupportedFormat

MAX_BYTES = 1 << 28
"""What an index may have at most, in bytes. A reader needs some twenty times as much memory, if it is made for that."""


class KeptTree(dict[str, Any]):
    """The tree of one tracked object, whose bytes are kept: if the very same comes again, they are not made again.

    So nothing in it may be changed once it is made. It holds nothing but text, whole numbers of less than 64 bits,
    and dicts with text as keys and lists of these, and no more than a few of them inside each other.
    """


class _EncodedTree(NamedTuple):
    """The bytes of one tree of the state."""

    data: bytes
    tree: KeptTree | None
    """What they are made of, if that is never changed."""


@dataclass(slots=True)
class EncodedIndex:
    """What the last index of a row of saves was, and its bytes: what is the same in the next is not done again."""

    tensors: tuple[TensorEntry, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    tensors_json: bytes = b""
    trees: Mapping[str, _EncodedTree] = field(default_factory=dict)
    """By tracked name; what their references say was looked up in `names`."""


def encode_index(index: Index, *, last: EncodedIndex | None = None) -> bytes:
    """The bytes of an index file. Its digest and size go into the manifest.

    Args:
        index: what was written.
        last: of an earlier call in the same row of saves; it is brought up to date.

    Raises:
        ValueError: an index that contradicts itself, state that is not typed JSON (NaN as a bare number, a
            lone surrogate), or too large an index.
        TypeError: state that holds a value JSON has no form for.
    """
    last = EncodedIndex() if last is None else last
    check_files(index)
    _encode_tensors(index, last)
    state = _encode_state(index, last)
    check_references([index.session], known=last.names)
    members = {
        **members_of_version(references=_refers(index)),
        "rank": index.rank,
        "algorithm": ALGORITHM,
        "block_size": index.block_size,
        "files": [_file_members(entry) for entry in index.files],
        "tensors": msgspec.Raw(last.tensors_json),
        "state": msgspec.Raw(state),
        "session": msgspec.Raw(strict_json.dump(index.session)),
    }
    data = msgspec.json.encode(members) + b"\n"
    if len(data) > MAX_BYTES:
        raise ValueError(f"an index of {len(data)} bytes, more than {MAX_BYTES}: keep large values as arrays")
    return data


def _encode_tensors(index: Index, last: EncodedIndex) -> None:
    """Bring what `last` has of the tensors up to date, if they are others."""
    sizes = {entry.name: entry.size for entry in index.files}
    if (
        last.tensors_json
        and sizes == last.sizes
        and len(index.tensors) == len(last.tensors)
        and all(map(is_, index.tensors, last.tensors))
    ):
        return
    check_tensors(index, complete=False)
    encoded = msgspec.json.encode(index.tensors)
    names = frozenset(tensor.name for tensor in index.tensors)
    # All at once, after all that can fail. The state's references are to be looked up among the new names.
    last.tensors, last.sizes, last.names = index.tensors, sizes, names
    last.tensors_json, last.trees = encoded, {}


def _encode_state(index: Index, last: EncodedIndex) -> bytes:
    """The JSON of the state, tree by tree: what is the same object, or gives the same bytes, is not judged again."""
    if not all(type(name) is str for name in index.state):
        raise TypeError("names of tracked objects are text")
    trees = {name: _encode_tree(tree, last.trees.get(name)) for name, tree in index.state.items()}
    changed = [index.state[name] for name, one in trees.items() if one is not last.trees.get(name)]
    check_references(changed, known=last.names)
    last.trees = trees
    members = (strict_json.dump(name) + b":" + one.data for name, one in trees.items())
    return b"{" + b",".join(members) + b"}"


def _encode_tree(tree: Any, last: _EncodedTree | None) -> _EncodedTree:
    if isinstance(tree, KeptTree):
        if last is not None and last.tree is tree:
            return last
        return _EncodedTree(
            msgspec.json.encode(tree), tree
        )  # of such values it writes what `strict_json` does
    known = b"" if last is None else last.data
    data = strict_json.dump(tree, known=known, around=1)
    return last if last is not None and last.tree is None and data == known else _EncodedTree(data, None)


def _file_members(entry: FileEntry) -> dict[str, Any]:
    members: dict[str, Any] = {"name": entry.name, "size": entry.size, "digests": entry.digests}
    if entry.checkpoint is not None:
        members |= {"checkpoint": entry.checkpoint, "age_s": entry.age_s}
    return members


def _refers(index: Index) -> bool:
    return any(entry.checkpoint is not None for entry in index.files)


def decode_index(data: bytes, *, checkpoint: str, file: str, complete: bool = True) -> Index:
    """What an index file says, checked against itself.

    The caller has compared the bytes with the size and SHA-256 in the manifest; here it is checked that the
    content makes sense, so that no reader has to.

    Args:
        data: the whole file.
        checkpoint: the checkpoint's name, for the error.
        file: the index's name, for the error.
        complete: whether the slices must cover every tensor exactly once, as they do when one rank wrote
            everything. Otherwise `tiling_problem` judges all ranks together.

    Raises:
        DamagedCheckpoint: it is no index, or contradicts itself.
        UnsupportedFormat: written by a newer spotsafe.
    """
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES} bytes")
        with _collection_paused():
            index = _parse(data, checkpoint=checkpoint, file=f"{checkpoint}/{file}")
            check_index(index, complete=complete)
    except UnsupportedFormat:
        raise
    except (ValueError, msgspec.ValidationError) as error:  # in old msgspec the one is not the other
        raise DamagedCheckpoint(checkpoint=checkpoint, file=file, reason=str(error)) from error
    return index


def _parse(data: bytes, *, checkpoint: str, file: str) -> Index:
    document = read_document(data, file=file, checkpoint=checkpoint)
    index = Index(
        rank=document.rank,
        block_size=document.block_size,
        files=document.files,
        tensors=document.tensors,
        state=document.state,
        session=document.session,
    )
    unknown = _unknown_words(document)
    if unknown:
        raise unsupported(unknown, file=file, checkpoint=checkpoint)
    check_references_required({"requires": document.requires}, references=_refers(index))
    return index


def _unknown_words(document: Document) -> list[str]:
    """What this version does not know."""
    words = {f"dtype {name}" for name in {tensor.dtype for tensor in document.tensors} - dtypes.DTYPES.keys()}
    words |= {f"role {name}" for name in {tensor.role for tensor in document.tensors} - set(ROLES)}
    words |= {f"digests {document.algorithm}"} - {f"digests {ALGORITHM}"}
    return sorted(words)


@contextmanager
def _collection_paused() -> Iterator[None]:
    """No garbage collection while a tree of a million values grows: that is half of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


__all__ = [
    "MAX_BYTES",
    "ROLES",
    "EncodedIndex",
    "FileEntry",
    "Index",
    "KeptTree",
    "Slice",
    "TensorEntry",
    "decode_index",
    "encode_index",
    "tiling_problem",
]
