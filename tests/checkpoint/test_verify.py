"""Verification: a whole checkpoint has no fault, and nothing that differs stays unseen."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from spotsafe.checkpoint.candidates import read_candidate
from spotsafe.checkpoint.digest import BLOCK, block_digests, sha256_hex
from spotsafe.checkpoint.index import decode_index, encode_index
from spotsafe.checkpoint.layout import CheckpointName, data_file, index_file
from spotsafe.checkpoint.manifest import Marker, encode_manifest, encode_marker
from spotsafe.checkpoint.verify import Fault, verify
from spotsafe.errors import StorageRefused, StorageShort, StorageUnavailable, UnsupportedFormat
from spotsafe.testing.faults import FailingStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.saves import Attempt

DATA, OTHER, INDEX = data_file(0, 0), data_file(0, 1), index_file(0)


def saved(**options: object) -> tuple[MemoryStore, CheckpointName]:
    """A run with one checkpoint of two data files."""
    store = MemoryStore()
    result = Attempt(store).save(7, **options)
    assert result.published
    return store, result.name


def files_of(faults: list[Fault]) -> list[str]:
    """Which files are at fault."""
    return [fault.file for fault in faults]


def test_whole_checkpoint_has_no_fault() -> None:
    """What was just saved verifies, also with several files, dtypes, a scalar and an empty tensor."""
    arrays = {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.array(3.0),
        "c": np.zeros((0, 5), dtype=np.int64),
        "d": np.array([1 + 2j]),
        "e": np.array([True, False]),
    }
    store, name = saved(arrays=arrays)
    assert verify(store, name) == []


def test_every_flipped_bit_is_found() -> None:
    """A single flipped bit anywhere in any file of the checkpoint is a fault of exactly that file."""
    store, name = saved(arrays={"w": np.ones(3, dtype=np.float32)}, files=1)
    for path, data in list(store.objects.items()):
        if not path.startswith(name.folder):
            continue
        bits = range(len(data) * 8) if len(data) < 1000 else [*range(0, 600 * 8, 7), len(data) * 8 - 1]
        for bit in bits:
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            store.objects[path] = bytes(flipped)
            assert files_of(verify(store, name)) == [path.rpartition("/")[2]], f"bit {bit} of {path}"
        store.objects[path] = data
    assert verify(store, name) == []


def cut(data: bytes) -> bytes:
    return data[:-1]


def lengthen(data: bytes) -> bytes:
    return data + b"\0"


def empty(data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("change", [cut, lengthen, empty])
@pytest.mark.parametrize("file", [DATA, OTHER, INDEX, "manifest.json"])
def test_wrong_length_is_found(file: str, change: Callable[[bytes], bytes]) -> None:
    """A file that was shortened, lengthened or emptied is a fault of that file."""
    store, name = saved()
    path = f"{name.folder}/{file}"
    store.objects[path] = change(store.objects[path])
    assert files_of(verify(store, name)) == [file]


@pytest.mark.parametrize("file", [DATA, OTHER, INDEX])
def test_missing_file_is_found(file: str) -> None:
    """A file that is gone is a fault, not an error."""
    store, name = saved()
    del store.objects[name.file(file)]
    assert verify(store, name) == [Fault(file=file, reason="is missing")]


def test_swapped_files_are_found() -> None:
    """Two data files of equal size that changed places are both at fault."""
    arrays = {"a": np.zeros(4, dtype=np.float32), "b": np.ones(4, dtype=np.float32)}
    store, name = saved(arrays=arrays)
    one, two = name.file(DATA), name.file(OTHER)
    assert len(store.objects[one]) == len(store.objects[two])
    store.objects[one], store.objects[two] = store.objects[two], store.objects[one]
    assert files_of(verify(store, name)) == [DATA, OTHER]


def test_files_of_another_checkpoint_are_found() -> None:
    """An index or a manifest of another checkpoint of the same run is no replacement."""
    store = MemoryStore()
    attempt = Attempt(store)
    old, new = attempt.save(1).name, attempt.save(2).name
    for file in (INDEX, "manifest.json"):
        changed = store.copy()
        changed.objects[f"{new.folder}/{file}"] = store.objects[f"{old.folder}/{file}"]
        assert files_of(verify(changed, new)) == [file]


def test_faults_of_several_files_are_all_listed() -> None:
    """Verification does not stop at the first fault."""
    store, name = saved()
    del store.objects[name.file(DATA)]
    store.objects[name.file(OTHER)] += b"x"
    assert files_of(verify(store, name)) == [DATA, OTHER]


@pytest.mark.parametrize(
    ("marker", "reason"), [(None, "never published"), ("abandoned", "abandoned"), ("retired", "retired")]
)
def test_what_does_not_exist_is_said(marker: str | None, reason: str) -> None:
    """Without a manifest there is one fault that tells why."""
    store, name = saved()
    del store.objects[name.manifest]
    if marker:
        store.put(name.manifest, encode_marker(Marker(state=marker)))
    assert verify(store, name) == [Fault(file="manifest.json", reason=reason)]


def test_header_that_contradicts_the_index_is_found() -> None:
    """Digests that fit a wrong header do not help: its tensors are compared with the index too."""
    store, name = saved(arrays={"w": np.ones(4, dtype=np.float32)}, files=1)
    path = name.file(DATA)
    store.objects[path] = store.objects[path].replace(b'"F32","shape":[4]', b'"I32","shape":[4]')
    resign(store, name)
    assert verify(store, name) == [Fault(file=DATA, reason="its header lists other tensors than the index")]
    store.objects[path] = b"\xff" * len(store.objects[path])
    resign(store, name)
    assert "header" in verify(store, name)[0].reason


def resign(store: MemoryStore, name: CheckpointName) -> None:
    """Make digests and sizes fit whatever lies in the data files, as a faulty writer would."""
    recut(store, name, block_size=BLOCK)


def recut(store: MemoryStore, name: CheckpointName, *, block_size: int) -> None:
    """The same, with digests of blocks of another size."""
    index = decode_index(store.objects[name.file(INDEX)], checkpoint=str(name), file=INDEX)
    files = tuple(
        msgspec.structs.replace(
            file, digests=block_digests(store.objects[name.file(file.name)], block_size=block_size)
        )
        for file in index.files
    )
    data = encode_index(dataclasses.replace(index, files=files, block_size=block_size))
    manifest = read_candidate(store, name).manifest
    assert manifest is not None
    part = dataclasses.replace(manifest.parts[0], size=len(data), sha256=sha256_hex(data))
    store.objects[name.file(INDEX)] = data
    store.objects[name.manifest] = encode_manifest(dataclasses.replace(manifest, parts=(part,)))


class Wrong(MemoryStore):
    """Answers wrongly: every second time, or always where a test says so.

    Attributes:
        how: ``flip`` a bit, answer that the object is too ``short``, or tell another ``size``.
        always: paths of which no answer is right.
    """

    def __init__(self, store: MemoryStore, how: str) -> None:
        super().__init__()
        self.objects.update(store.objects)
        self.how = how
        self.always: set[str] = set()
        self.asked: Counter[tuple[str, str]] = Counter()

    def read(self, path: str, *, max_bytes: int) -> bytes:
        data = super().read(path, max_bytes=max_bytes)
        return (
            bytes([data[0] ^ 1]) + data[1:] if self.how == "flip" and self._is_wrong("read", path) else data
        )

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        super().read_into(path, offset, buffer)
        if self.how in {"flip", "short"} and self._is_wrong("read_into", path):
            if self.how == "short":
                raise StorageShort(f"{path} ends", path=path)
            buffer[0] ^= 1

    def size(self, path: str) -> int:
        return super().size(path) + (self.how == "size" and self._is_wrong("size", path))

    def _is_wrong(self, call: str, path: str) -> bool:
        self.asked[call, path] += 1
        return path in self.always or self.asked[call, path] % 2 == 1


@pytest.mark.parametrize("how", ["flip", "short", "size"])
def test_one_bad_answer_is_no_verdict(how: str) -> None:
    """Each file whose first answer is wrong, in whichever way, and whose second is not is whole."""
    store, name = saved()
    wrong = Wrong(store, how)
    assert verify(wrong, name) == []
    assert wrong.asked


@pytest.mark.parametrize(
    ("how", "reason"),
    [("flip", "are not what was published"), ("short", "is too short"), ("size", "bytes, not")],
)
def test_two_bad_answers_are(how: str, reason: str) -> None:
    """It is a fault of that file, told once, and the next one is still looked at."""
    store, name = saved()
    wrong = Wrong(store, how)
    wrong.always = {name.file(DATA)}
    (fault,) = verify(wrong, name)
    assert fault.file == DATA
    assert reason in fault.reason


def test_a_header_of_several_blocks() -> None:
    """It is read again as a whole, and verified like everything else."""
    arrays = {f"tensor.{number:04d}": np.ones(1, dtype=np.float32) for number in range(100)}
    store, name = saved(arrays=arrays, files=1)
    recut(store, name, block_size=1000)
    assert verify(store, name) == []
    assert verify(Wrong(store, "flip"), name) == []
    data = bytearray(store.objects[name.file(DATA)])
    data[2500] ^= 1
    store.objects[name.file(DATA)] = bytes(data)
    reason = "bytes 2000 to 3000 are not what was published"
    assert verify(store, name) == [Fault(file=DATA, reason=reason)]


@pytest.mark.parametrize("operation", ["read", "read_into", "size"])
@pytest.mark.parametrize("error", [StorageUnavailable("down"), StorageRefused("no")])
def test_storage_error_is_no_fault(operation: str, error: Exception) -> None:
    """What the store could not answer is raised, never listed as damage."""
    store, name = saved()
    failing = FailingStore(store, fail=lambda method, path, number: error if method == operation else None)
    with pytest.raises(type(error)):
        verify(failing, name)


def test_newer_format_is_no_fault() -> None:
    """A checkpoint of a newer version is not called damaged."""
    from spotsafe.checkpoint import sealed

    store, name = saved()
    members = sealed.unseal(store.objects[name.manifest], max_bytes=1 << 20)
    store.objects[name.manifest] = sealed.seal({**members, "format": 2})
    with pytest.raises(UnsupportedFormat):
        verify(store, name)


def test_memory_is_bounded_by_a_block() -> None:
    """A file of several blocks is read one block after the other; a fault names the place."""
    arrays = {"w": np.zeros(5 * BLOCK // 2, dtype=np.uint8)}
    store, name = saved(arrays=arrays, files=1)
    data = bytearray(store.objects[name.file(DATA)])
    data[BLOCK + 5] ^= 1
    store.objects[name.file(DATA)] = bytes(data)
    del data
    tracemalloc.start()
    faults = verify(store, name)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    reason = f"bytes {BLOCK} to {2 * BLOCK} are not what was published"
    assert faults == [Fault(file=DATA, reason=reason)]
    assert peak < 2.5 * BLOCK  # one block, and the slice that the memory store makes of it
