"""The specification is enough: a reader that uses nothing of ours reads what we write."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from spotsafe.checkpoint import dtypes, typed, typed_decode, typed_scalars
from spotsafe.checkpoint.digest import block_digests, sha256_hex
from spotsafe.checkpoint.image import ImageTensor, plan_image
from spotsafe.checkpoint.index import FileEntry, Index, Slice, TensorEntry, encode_index
from spotsafe.checkpoint.layout import CheckpointName, data_file, index_file
from spotsafe.checkpoint.manifest import Health, Manifest, Marker, Part, encode_manifest, encode_marker

SPECIFICATION = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
NUMPY = {"float32": "<f4", "int64": "<i8", "complex128": "<c16"}


def write(run: Path, name: CheckpointName, arrays: dict[str, np.ndarray[Any, Any]], state: Any) -> None:
    """A checkpoint by our code, each array in one piece but the first, which is cut along its rows."""
    first = next(iter(arrays))
    boxes = {key: [((0,) * array.ndim, array.shape)] for key, array in arrays.items()}
    rows, *rest = arrays[first].shape
    boxes[first] = [((0, *[0] * len(rest)), (1, *rest)), ((1, *[0] * len(rest)), (rows - 1, *rest))]
    keys = {(key, box): f"{key}[{','.join(map(str, box[0]))}]" for key in arrays for box in boxes[key]}
    infos = {key: dtypes.DTYPES[str(array.dtype)] for key, array in arrays.items()}
    image = plan_image(
        ImageTensor.of(keys[key, box], dtype=infos[key], shape=box[1]) for key in arrays for box in boxes[key]
    )
    data = bytearray(image.header.ljust(image.size, b"\0"))
    tensors = []
    for key, array in arrays.items():
        slices = []
        for offsets, lengths in boxes[key]:
            inside = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
            content, start = array[inside].tobytes(), image.starts[keys[key, (offsets, lengths)]]
            data[start : start + len(content)] = content
            slices.append(
                Slice(
                    offsets=offsets, lengths=lengths, file=data_file(0, 0), start=start, nbytes=len(content)
                )
            )
        entry = TensorEntry(name=key, dtype=str(array.dtype), shape=array.shape, slices=tuple(slices))
        tensors.append(entry)
    digests = block_digests(bytes(data), block_size=1000)
    file = FileEntry(name=data_file(0, 0), size=len(data), digests=digests)
    index = encode_index(Index(rank=0, block_size=1000, files=(file,), tensors=tuple(tensors), state=state))
    manifest = Manifest(
        run=name.nonce,
        attempt=name.attempt,
        step=name.step,
        save=name.save,
        nonce=name.nonce,
        parent=None,
        created=1.0,
        world_size=1,
        reason="asked",
        health=Health(healthy=True),
        parts=(Part(rank=0, file=index_file(0), size=len(index), sha256=sha256_hex(index)),),
        total_bytes=len(data),
    )
    folder = run / name.folder
    folder.mkdir(parents=True)
    (folder / data_file(0, 0)).write_bytes(data)
    (folder / index_file(0)).write_bytes(index)
    (folder / "manifest.json").write_bytes(encode_manifest(manifest))


def read_newest(run: Path) -> tuple[str, dict[str, np.ndarray[Any, Any]], Any]:
    """A reader from the last section of the specification; nothing here comes from spotsafe."""
    found = []
    for folder in (run / "checkpoints").iterdir():
        match = re.fullmatch(r"a(\d{6,})-s(\d{9,})-(\d{4,})-([0-9a-f]{8})", folder.name)
        if match and (folder / "manifest.json").exists():
            found.append((*map(int, match.groups()[:3]), match[4], folder))
    for *numbers, nonce, folder in sorted(found, reverse=True):
        raw = (folder / "manifest.json").read_bytes()
        assert raw[:11] == b'{"sha256":"'
        assert raw[11:75].decode() == hashlib.sha256(raw[:11] + b"0" * 64 + raw[75:]).hexdigest()
        manifest = json.loads(raw)
        assert (manifest["format"], manifest["requires"]) == (1, [])
        if "state" in manifest:
            continue
        assert [manifest[key] for key in ("attempt", "step", "save", "nonce")] == [*numbers, nonce]
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for part in manifest["parts"]:
            index_bytes = (folder / part["file"]).read_bytes()
            assert len(index_bytes) == part["size"]
            assert hashlib.sha256(index_bytes).hexdigest() == part["sha256"]
            index = json.loads(index_bytes)
            files = {entry["name"]: read_file(folder, entry, index["block_size"]) for entry in index["files"]}
            for tensor in index["tensors"]:
                array = arrays.setdefault(tensor["name"], np.empty(tensor["shape"], NUMPY[tensor["dtype"]]))
                for piece in tensor["slices"]:
                    content = files[piece["file"]][piece["start"] : piece["start"] + piece["nbytes"]]
                    box = tuple(
                        slice(o, o + n) for o, n in zip(piece["offsets"], piece["lengths"], strict=True)
                    )
                    array[box] = np.frombuffer(content, array.dtype).reshape(piece["lengths"])
        return folder.name, arrays, index["state"]
    raise AssertionError("no checkpoint")


def read_file(folder: Path, entry: dict[str, Any], block: int) -> bytes:
    """A data file, its blocks compared."""
    data = (folder / entry["name"]).read_bytes()
    assert len(data) == entry["size"]
    blocks = [data[at : at + block] for at in range(0, len(data), block)]
    assert [xxhash.xxh3_128_hexdigest(one) for one in blocks] == entry["digests"]
    return data


def test_a_reader_from_the_specification_alone_reads_a_checkpoint(tmp_path: Path) -> None:
    """The newest that is published; a retired and an unpublished one above it are passed over."""
    arrays = {
        "w": np.arange(12, dtype=np.float32).reshape(4, 3),
        "n": np.array(7),
        "z": np.array([1 + 2j, complex(float("nan"), -0.0)]),
    }
    state = {"model": typed.encode({"w": typed.TensorRef("w"), "b": b"\xff"}, path="model")}
    for step in (9, 10):
        write(tmp_path, CheckpointName(1, step, step, "0" * 8), {**arrays, "n": np.array(step)}, state)
    retired, unpublished = CheckpointName(1, 11, 11, "0" * 8), CheckpointName(2, 0, 1, "1" * 8)
    write(tmp_path, retired, arrays, state)
    (tmp_path / retired.manifest).write_bytes(encode_marker(Marker(state="retired")))
    write(tmp_path, unpublished, arrays, state)
    (tmp_path / unpublished.manifest).unlink()
    name, loaded, read_state = read_newest(tmp_path)
    assert name == "a000001-s000000010-0010-00000000"
    assert loaded["n"] == 10
    for key in ("w", "z"):
        assert loaded[key].tobytes() == arrays[key].tobytes()
    assert read_state["model"]["w"] == {"$": "tensor", "name": "w"}
    assert base64.b64decode(read_state["model"]["b"]["base64"]) == b"\xff"


def test_the_specification_names_every_tag_dtype_and_limit() -> None:
    """Whoever adds a kind of value adds a line to the page."""
    tags = [*typed_scalars.DECODERS, *typed_decode._CONTAINERS]
    missing = [tag for tag in tags if f"`{tag}`" not in SPECIFICATION]
    ranged = re.compile(r"u?int[2-6]")
    missing += [
        name for name in dtypes.DTYPES if f"`{name}`" not in SPECIFICATION and not ranged.fullmatch(name)
    ]
    missing += [code for code in dtypes.CODE_BYTES if f"`{code}`" not in SPECIFICATION]
    assert not missing
    assert f"{typed.MAX_DEPTH} deep" in SPECIFICATION
