"""A reader of checkpoints, written from docs/format.md alone: standard library and numpy, nothing of ours.

It reads a run in a local folder. Seals, SHA-256 and sizes are compared; digests of blocks are not, for there is no
XXH3 in either. Tensors come as numpy arrays; those of a dtype that numpy lacks as their bytes, in one more, last
dimension. What only a program or torch could rebuild comes as its tag and its members.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64decode
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np

NAME = re.compile(r"a(\d{6,})-s(\d{9,})-(\d{4,})-([0-9a-f]{8})")
NUMPY = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "int64": "<i8", "int32": "<i4", "int16": "<i2",
    "int8": "|i1", "uint64": "<u8", "uint32": "<u4", "uint16": "<u2", "uint8": "|u1", "bool": "|b1",
    "complex128": "<c16", "complex64": "<c8",
}  # fmt: skip
ITEM_BYTES = {name: np.dtype(code).itemsize for name, code in NUMPY.items()}  # of others 1
ITEM_BYTES |= {"bfloat16": 2, "complex32": 4, "bits16": 2}


class Checkpoint(NamedTuple):
    name: str
    manifest: dict[str, Any]
    dtypes: dict[str, str]
    tensors: dict[str, np.ndarray[Any, Any]]
    state: dict[str, Any]
    session: Any


def read_newest(run: Path) -> Checkpoint:
    """The newest published checkpoint that no rollback set aside (sections 9 and 11)."""
    records = [path for path in (run / "attempts").glob("*.json") if re.fullmatch(r"\d{6,}", path.stem)]
    newest = max(records, key=lambda path: int(path.stem), default=None)
    back = [] if newest is None else unseal(newest).get("rollbacks", [])
    names = [folder.name for folder in (run / "checkpoints").iterdir() if NAME.fullmatch(folder.name)]
    for name in sorted(names, key=order, reverse=True):
        aside = any(order(name) > order(one["to"]) and order(name)[0] <= one["attempt"] for one in back)
        path = run / "checkpoints" / name / "manifest.json"
        manifest = unseal(path) if path.exists() and not aside else {"state": "absent"}  # section 4
        if "state" not in manifest:
            numbers = tuple(manifest[key] for key in ("attempt", "step", "save", "nonce"))
            check(numbers == order(name), "a manifest of another folder")
            return read_checkpoint(path.parent, manifest)
    raise FileNotFoundError(f"{run}: no published checkpoint")


def order(name: str) -> tuple[int | str, ...]:
    parts: Any = NAME.fullmatch(name)
    return (*map(int, parts.group(1, 2, 3)), parts[4])


def unseal(path: Path) -> dict[str, Any]:
    """A sealed file (section 3) of a version that this reader knows."""
    data = path.read_bytes()
    digest = hashlib.sha256(data[:11] + b"0" * 64 + data[75:]).hexdigest()
    check(data[11:75].decode() == digest, "a broken seal")
    members: dict[str, Any] = json.loads(data)
    check(members["format"] == 1 and set(members["requires"]) <= {"references"}, "a newer version")
    return members


def read_checkpoint(folder: Path, manifest: dict[str, Any]) -> Checkpoint:
    """Indexes and tensors (section 5), and the values (section 6)."""
    indexes = [read_index(folder, part) for part in sorted(manifest["parts"], key=lambda part: part["rank"])]
    dtypes: dict[str, str] = {}
    raws: dict[str, np.ndarray[Any, Any]] = {}  # with a last dimension of the bytes of an item
    missing: Counter[str] = Counter()
    for index in indexes:
        paths = [(entry.get("checkpoint", folder.name), entry["name"]) for entry in index["files"]]
        files = {path[-1]: folder.parent.joinpath(*path).read_bytes() for path in paths}
        check(all(len(files[entry["name"]]) == entry["size"] for entry in index["files"]), "another size")
        for entry in index["tensors"]:
            name, size = entry["name"], ITEM_BYTES.get(entry["dtype"], 1)
            if name not in raws:
                dtypes[name], raws[name] = entry["dtype"], np.empty((*entry["shape"], size), np.uint8)
                missing[name] = raws[name].size
            check(raws[name].shape == (*entry["shape"], size), "ranks that differ")
            for piece in entry["slices"]:
                content = files[piece["file"]][piece["start"] : piece["start"] + piece["nbytes"]]
                ends = [at + n for at, n in zip(piece["offsets"], piece["lengths"], strict=True)]
                target = raws[name][tuple(map(slice, piece["offsets"], ends))]
                target[...] = np.frombuffer(content, np.uint8).reshape(target.shape)
                missing[name] -= len(content)
    check(not any(missing.values()), "slices that do not cover a tensor exactly once")
    known = {name: raw.reshape(-1).view(NUMPY[dtypes[name]]).reshape(raw.shape[:-1])
             for name, raw in raws.items() if dtypes[name] in NUMPY}  # fmt: skip
    tensors = {**raws, **known}
    state = {name: decode(tree, tensors) for index in indexes for name, tree in index["state"].items()}
    return Checkpoint(folder.name, manifest, dtypes, tensors, state, decode(indexes[0]["session"], tensors))


def read_index(folder: Path, part: dict[str, Any]) -> dict[str, Any]:
    """What one rank wrote."""
    data = (folder / part["file"]).read_bytes()
    check(hashlib.sha256(data).hexdigest() == part["sha256"], "an index that differs")
    index: dict[str, Any] = json.loads(data)
    check(index["format"] == 1 and set(index["requires"]) <= {"references"}, "a newer version")
    return index


def check(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def decode(node: Any, tensors: dict[str, np.ndarray[Any, Any]]) -> Any:
    """The value of typed JSON (section 6)."""

    def again(inner: Any) -> Any:
        return decode(inner, tensors)

    if isinstance(node, list):
        return [again(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "$" not in node:
        return {key: again(value) for key, value in node.items()}
    tag = node["$"]
    if tag == "tensor":
        value = tensors[node["name"]]
    elif tag in CONTAINERS:
        value = CONTAINERS[tag]([again(item) for item in node["items"]])
    elif tag in KINDS:
        value = KINDS[tag](node, again)
    else:
        check(tag.startswith(("enum", "dataclass", "torch.")), f"an unknown tag {tag!r}: upgrade")
        value = tag, {key: again(member) for key, member in node.items() if key != "$"}
    return value


def numpy_scalar(node: Any, again: Callable[[Any], Any]) -> Any:
    if node["dtype"] in {"str", "bytes"}:
        return (
            np.str_(again(node["value"])) if node["dtype"] == "str" else np.bytes_(b64decode(node["base64"]))
        )
    return np.frombuffer(bytes.fromhex(node["hex"]), node["dtype"])[0]


def ordered_dict(node: Any, again: Callable[[Any], Any]) -> Any:
    value = OrderedDict(map(again, node["items"]))
    vars(value).update(again(node.get("attributes", {})))
    return value


def with_zone(kind: Any) -> Callable[[Any, Callable[[Any], Any]], Any]:
    return lambda node, again: kind(*node["fields"], fold=node["fold"], tzinfo=again(node["zone"]))


def three(kind: Any) -> Callable[[Any, Callable[[Any], Any]], Any]:
    return lambda node, again: kind(*(again(node[key]) for key in ("start", "stop", "step")))


PATHS = {"local": Path, "posix": PurePosixPath, "windows": PureWindowsPath}
CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple, "namedtuple": tuple, "set": set, "frozenset": frozenset, "dict": dict, "defaultdict": dict,
    "counter": lambda pairs: Counter(dict(pairs)), "namespace": lambda pairs: SimpleNamespace(**dict(pairs)),
}  # fmt: skip
KINDS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "int": lambda node, _: int(node["hex"], 16),
    "float": lambda node, _: float(node["value"]),
    "complex": lambda node, again: complex(again(node["real"]), again(node["imag"])),
    "str": lambda node, _: b64decode(node["base64"]).decode("utf-8", "surrogatepass"),
    "bytes": lambda node, _: b64decode(node["base64"]),
    "bytearray": lambda node, _: bytearray(b64decode(node["base64"])),
    "ordered_dict": ordered_dict,
    "deque": lambda node, again: deque(map(again, node["items"]), node["maxlen"]),
    "slice": three(slice),
    "range": three(range),
    "ellipsis": lambda *_: ...,
    "path": lambda node, again: PATHS[node["flavour"]](again(node["text"])),
    "date": lambda node, _: date(*node["fields"]),
    "time": with_zone(time),
    "datetime": with_zone(datetime),
    "timedelta": lambda node, _: timedelta(*node["fields"]),
    "timezone": lambda node, again: timezone(
        timedelta(*node["offset"]), *([] if node["name"] is None else [again(node["name"])])
    ),
    "decimal": lambda node, _: Decimal(node["text"]),
    "fraction": lambda node, again: Fraction(again(node["numerator"]), again(node["denominator"])),
    "uuid": lambda node, _: UUID(hex=node["hex"]),
    "numpy": numpy_scalar,
    "ndarray": lambda node, again: np.frombuffer(again(node["values"]).tobytes(), node["dtype"]).reshape(
        node["shape"]
    ),
}
