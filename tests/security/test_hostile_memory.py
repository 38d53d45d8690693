"""Folders that ask for more memory than there is: an error of the tree that names the file, whatever reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spotsafe.checkpoint.catalog import resolve
from spotsafe.checkpoint.digest import block_digest
from spotsafe.storage.open import open_store
from tests.security.forging import forge_index, forge_manifest, trained
from tests.security.limited import in_child

pytestmark = pytest.mark.slow
DATA = "data-00000-000.safetensors"
BLOCK = 1 << 26


def newest(run: Path) -> Path:
    return run / resolve(open_store(str(run))).name.folder


def sparse_data(run: Path, size: int) -> None:
    """The newest data file grows by a tensor of zeros that takes no room on the disk, all digests right."""
    path = newest(run) / DATA
    old = path.read_bytes()
    length = int.from_bytes(old[:8], "little")
    header, start = json.loads(old[8 : 8 + length]), 8 + length
    end = len(old) - start
    header["zeros"] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
    text = json.dumps(header).encode()
    data = (len(text)).to_bytes(8, "little") + text + old[start:]
    path.write_bytes(data)
    with path.open("r+b") as file:
        file.truncate(len(data) + size)

    def change(index: dict[str, Any]) -> None:
        moved = 8 + len(text) - start
        for tensor in index["tensors"]:
            for piece in tensor["slices"]:
                piece["start"] += moved if piece["file"] == DATA else 0
        place = {"offsets": [0], "lengths": [size], "file": DATA, "start": len(data), "nbytes": size}
        index["tensors"].append({"name": "zeros", "dtype": "uint8", "shape": [size], "slices": [place]})
        index["block_size"] = BLOCK
        for file in index["files"]:
            if file["name"] != DATA:
                file["digests"] = [block_digest((path.parent / file["name"]).read_bytes())]
                continue
            total = len(data) + size
            count, last = math.ceil(total / BLOCK), total % BLOCK or BLOCK
            middle = [block_digest(bytes(BLOCK))] * (count - 2)
            file["digests"] = [block_digest(data.ljust(BLOCK, b"\0")), *middle, block_digest(bytes(last))]
            file["size"] = total
        index["state"]["model"]["zeros"] = {"$": "tensor", "name": "zeros"}

    forge_index(run, change)


def sparse_index(run: Path, size: int) -> None:
    """An index of a terabyte that takes no room on the disk."""
    with (newest(run) / "index-00000.json").open("r+b") as file:
        file.truncate(size)
    forge_manifest(run, lambda manifest: manifest["parts"][0].update(size=size))


def full_index(run: Path, megabytes: int) -> None:
    """As many values as fit into so many megabytes."""

    def change(index: dict[str, Any]) -> None:
        index["junk"] = [{}] * (megabytes * 250_000)

    forge_index(run, change)


@pytest.mark.parametrize("what", ["load", "resume"])
@pytest.mark.parametrize(
    ("size", "megabytes"),
    [pytest.param(1 << 40, 3000, id="larger-than-all-memory"), pytest.param(1 << 32, 2000, id="not-granted")],
)
def test_a_sparse_file(what: str, size: int, megabytes: int, tmp_path: Path) -> None:
    """A terabyte is refused before any of it is asked for; what might fit is tried. No older checkpoint is taken."""
    run = trained(tmp_path / "run")
    sparse_data(run, size)
    found = in_child(what, run, megabytes=megabytes)
    assert (found["error"], found["ours"]) == ("NotEnoughMemory", True), found
    assert DATA in found["text"]
    assert found["peak"] < 200


def test_verifying_takes_a_block(tmp_path: Path) -> None:
    """However large the file; and it finds nothing wrong with that one."""
    run = trained(tmp_path / "run")
    sparse_data(run, 1 << 30)
    found = in_child("verify", run, megabytes=600)
    assert (found["code"], "damaged" in found["text"]) == (0, False), found
    assert found["peak"] < 3 * (BLOCK >> 20)


def test_a_file_that_is_longer_than_its_tensors(tmp_path: Path) -> None:
    """A safetensors file has no holes, so that its index is damaged: the older checkpoint is used."""
    run = trained(tmp_path / "run")
    size = 1 << 40
    with (newest(run) / DATA).open("r+b") as file:
        file.truncate(size)

    def change(index: dict[str, Any]) -> None:
        index["block_size"] = BLOCK
        (entry,) = (one for one in index["files"] if one["name"] == DATA)
        entry.update(size=size, digests=[block_digest(bytes(BLOCK))] * (size // BLOCK))
        for one in index["files"]:
            if one is not entry:
                one["digests"] = [block_digest((newest(run) / one["name"]).read_bytes())]

    forge_index(run, change)
    assert "more than its tensors" in in_child("load", run, megabytes=1000)["text"]
    found = in_child("resume", run, megabytes=3000)
    assert found["error"] == "", found


@pytest.mark.parametrize("what", ["load", "verify", "resume"])
def test_an_index_of_a_terabyte(what: str, tmp_path: Path) -> None:
    """Its manifest may not say so: nothing of it is read."""
    run = trained(tmp_path / "run")
    sparse_index(run, 1 << 40)
    found = in_child(what, run, megabytes=3000)
    assert found["ours"]
    assert found["error"] == {"load": "DamagedCheckpoint"}.get(what, ""), found
    assert what == "resume" or "index-00000.json" in found["text"]
    assert found["peak"] < 200


@pytest.mark.parametrize("what", ["load", "verify"])
def test_an_index_that_does_not_fit(what: str, tmp_path: Path) -> None:
    """Python needs some twenty times the bytes of small values; without them, the error names the index."""
    run = trained(tmp_path / "run")
    full_index(run, 16)
    found = in_child(what, run, megabytes=120)
    assert found["ours"]
    assert found["error"] == {"load": "NotEnoughMemory"}.get(what, ""), found
    assert "index-00000.json" in found["text"]
    assert found.get("code", 1) == 1


def folders(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"a000001-s{number + 10:09d}-0001-{number:08x}"


def strangers(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"stranger-{number}"


def attempts(run: Path, number: int) -> Path:
    return run / "attempts" / f"stranger-{number}.json"


@pytest.mark.parametrize(
    ("what", "path"),
    [
        ("load", folders),
        ("resume", folders),
        ("gc", folders),
        ("ls", strangers),
        ("gc", strangers),
        ("resume", attempts),
    ],
)
def test_many_names(what: str, path: Callable[[Path, int], Path], tmp_path: Path) -> None:
    """Ten thousand empty folders in the place of checkpoints, or of strangers anywhere: some megabytes."""
    run = trained(tmp_path / "run")
    for number in range(10_000):
        path(run, number).mkdir()
    found = in_child(what, run, megabytes=3000)
    assert (found["error"], found.get("code", 0)) == ("", 0), found
    assert found["peak"] < 150
