"""Indexes: exact round trips, and everything that contradicts itself is damage."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from spotsafe.checkpoint import index_document, strict_json, typed
from spotsafe.checkpoint.index import (
    MAX_BYTES,
    EncodedIndex,
    FileEntry,
    Index,
    KeptTree,
    Slice,
    TensorEntry,
    decode_index,
    encode_index,
    tiling_problem,
)
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.strict_json import MAX_DEPTH
from spotsafe.errors import DamagedCheckpoint, UnsupportedFormat

FILE = "data-00000-000.safetensors"
SECOND = "data-00000-001.safetensors"
FROZEN = "frozen-00000-000.safetensors"
OTHER = "a000001-s000000100-0001-01234567"


def piece(
    start: int, lengths: tuple[int, ...], *, offsets: Any = None, item: int = 4, file: str = FILE
) -> Slice:
    """A slice of items of 4 bytes."""
    nbytes = item
    for length in lengths:
        nbytes *= length
    where = tuple(0 for _ in lengths) if offsets is None else offsets
    return Slice(offsets=where, lengths=lengths, file=file, start=start, nbytes=nbytes)


def example(**changes: Any) -> Index:
    """A whole tensor, one in two pieces, an empty one, a scalar of complex numbers; state that refers to them."""
    fields: dict[str, Any] = {
        "rank": 0,
        "block_size": 4096,
        "files": (
            FileEntry(name=FILE, size=4096 + 64, digests=("0" * 32, "f" * 32)),
            FileEntry(name=SECOND, size=0, digests=()),
        ),
        "tensors": (
            TensorEntry(
                name="w", dtype="float32", shape=(2, 3), slices=(piece(4112, (2, 3)),), role="parameter"
            ),
            TensorEntry(
                name="cut",
                dtype="int32",
                shape=(4,),
                slices=(piece(4136, (1,), offsets=(3,)), piece(4140, (3,), offsets=(0,))),
            ),
            TensorEntry(name="empty", dtype="bfloat16", shape=(0, 7), slices=()),
            TensorEntry(
                name="z", dtype="complex128", shape=(), slices=(piece(4096, (), item=16),), role="moment"
            ),
        ),
        "state": {
            "model": {"w": {"$": "tensor", "name": "w"}, "n": [1.5, None, "\u03b2"]},
            "optimizer": typed.encode({0: (typed.TensorRef("z"), float("nan"))}, path="optimizer"),
        },
        "session": {"positions": {"$": "tuple", "items": [1]}, "rng": [{"$": "tensor", "name": "cut"}]},
    }
    return Index(**{**fields, **changes})


def decode(data: bytes, **options: Any) -> Index:
    """As a reader does."""
    return decode_index(data, checkpoint="c", file="index-00000.json", **options)


DOCUMENT: dict[str, Any] = json.loads(encode_index(example()))


def document(**changes: Any) -> bytes:
    """The file with members changed."""
    return json.dumps({**DOCUMENT, **changes}).encode()


def tensors_with(place: int, **changes: Any) -> bytes:
    """The file with members of one tensor changed."""
    tensors = [dict(tensor) for tensor in DOCUMENT["tensors"]]
    tensors[place].update(changes)
    return document(tensors=tensors)


def slice_with(place: int, **changes: Any) -> bytes:
    """The file with members of the first slice of one tensor changed."""
    slices = [dict(part) for part in DOCUMENT["tensors"][place]["slices"]]
    slices[0].update(changes)
    return tensors_with(place, slices=slices)


def file_with(**changes: Any) -> bytes:
    """The file with members of its first data file changed."""
    return document(files=[{**DOCUMENT["files"][0], **changes}, DOCUMENT["files"][1]])


def with_reference() -> Index:
    """The file `FROZEN` of another checkpoint holds one more tensor."""
    index = example()
    lent = FileEntry(name=FROZEN, size=4104, digests=("1" * 32, "2" * 32), checkpoint=OTHER, age_s=7.5)
    tensor = TensorEntry(name="f", dtype="float32", shape=(2,), slices=(piece(4096, (2,), file=FROZEN),))
    return dataclasses.replace(index, files=(*index.files, lent), tensors=(*index.tensors, tensor))


def referring(requires: Any = ("references",), **changes: Any) -> bytes:
    """That file with members of the reference changed."""
    members = json.loads(encode_index(with_reference()))
    members["files"][-1].update(changes)
    return json.dumps({**members, "requires": requires}).encode()


def test_references_come_back_and_are_required() -> None:
    """An older reader would look for the file in the wrong folder, so it is told to stop."""
    data = encode_index(with_reference())
    assert decode(data) == with_reference()
    assert json.loads(data)["requires"] == ["references"]
    assert json.loads(data)["files"][-1]["checkpoint"] == OTHER
    lent = decode(data).files[-1]
    name = CheckpointName(2, 1, 1, "00000000")
    assert lent.path(name) == f"checkpoints/{OTHER}/{FROZEN}"
    assert lent.shown() == f"{OTHER}/{FROZEN}"
    assert decode(data).files[0].path(name) == f"{name.folder}/{FILE}"


def test_an_index_comes_back() -> None:
    """Equal in every member, state with all its types included."""
    assert decode(encode_index(example())) == example()
    empty = Index(rank=3, block_size=1, files=(), tensors=())
    assert decode(encode_index(empty)) == empty


def test_the_document_is_what_the_format_says() -> None:
    """These documents lie on people's disks: version 1 must not drift."""
    assert list(DOCUMENT) == [
        *("format", "requires", "rank", "algorithm", "block_size", "files", "tensors", "state", "session")
    ]
    assert (DOCUMENT["format"], DOCUMENT["requires"], DOCUMENT["algorithm"]) == (1, [], "xxh3_128")
    assert DOCUMENT["files"][0] == {"name": FILE, "size": 4160, "digests": ["0" * 32, "f" * 32]}
    assert DOCUMENT["tensors"][0] == {
        "name": "w",
        "dtype": "float32",
        "shape": [2, 3],
        "slices": [{"offsets": [0, 0], "lengths": [2, 3], "file": FILE, "start": 4112, "nbytes": 24}],
        "role": "parameter",
    }


def test_fifty_thousand_tensors_take_no_time() -> None:
    """A large model of many experts; the bound is generous for a busy machine."""
    count = 50_000
    tensors = tuple(
        TensorEntry(name=f"layers.{n}.weight", dtype="float32", shape=(4, 4), slices=(piece(64 * n, (4, 4)),))
        for n in range(count)
    )
    state = {"model": {tensor.name: {"$": "tensor", "name": tensor.name} for tensor in tensors}}
    files = (FileEntry(name=FILE, size=64 * count, digests=("0" * 32,)),)
    index = Index(rank=0, block_size=1 << 24, files=files, tensors=tensors, state=state)
    started = time.process_time()
    assert decode(encode_index(index)) == index
    assert time.process_time() - started < 8


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (document(rank=-1), "rank"),
        (document(rank=True), "Expected `int`"),
        (document(block_size=0), "block_size"),
        (document(files=[DOCUMENT["files"][0]] * 2), "same file twice"),
        (file_with(name="../x"), "no data file's name"),
        (file_with(name="index-00000.json"), "no data file's name"),
        (file_with(size=-1), "size of -1"),
        (file_with(size=4096), "2 digests for 4096"),
        (file_with(digests=["0" * 32]), "1 digests"),
        (file_with(digests=["0" * 32, "F" * 32]), "32 hexadecimal"),
        (file_with(digests=["0" * 32, "f" * 31]), "32 hexadecimal"),
        (document(tensors=[DOCUMENT["tensors"][0]] * 2), "same tensor twice"),
        (tensors_with(0, shape=[2, -3]), "shape out of range"),
        (tensors_with(0, shape=[1] * 65), "shape out of range"),
        (tensors_with(0, shape=[10**30, 3]), "shape out of range"),
        (tensors_with(0, shape=[0, 1 << 62], slices=[]), "more bytes than there can be"),
        (file_with(name="data-00001-000.safetensors"), "of rank 0"),
        (referring(name="data-00000-007.safetensors"), "is no file that may"),
        (referring(checkpoint="../x"), "no checkpoint's name"),
        (referring(requires=[]), "without requiring"),
        (referring(age_s=-1.0), "an age of -1.0"),
        (referring(age_s="x"), "Expected `float`"),
        (tensors_with(0, shape=[2, 3.0]), "Expected `int`"),
        (tensors_with(0, shape=[6]), "dimensions"),
        (tensors_with(0, shape=[2, 4]), "exactly once"),
        (tensors_with(0, shape=[1, 3]), "outside the tensor"),
        (tensors_with(0, slices=[]), "exactly once"),
        (tensors_with(0, dtype="float64"), "24 bytes"),
        (tensors_with(0, dtype=None), "Expected `str`"),
        (slice_with(0, nbytes=25), "25 bytes"),
        (slice_with(0, file=SECOND), "outside data-00000-001"),
        (slice_with(0, file="data-00000-009.safetensors"), "not listed"),
        (slice_with(0, start=-1), "outside"),
        (slice_with(0, start=4137), "outside"),
        (slice_with(0, start=10**4000), "outside"),
        (slice_with(0, start=4110), "share byte 4110"),
        (slice_with(0, offsets=[0]), "dimensions"),
        (slice_with(0, offsets=[0, 1]), "outside the tensor"),
        (slice_with(1, offsets=[2]), "exactly once"),
        (slice_with(1, offsets=[4]), "outside the tensor"),
        (slice_with(1, lengths=[0], nbytes=0), "exactly once"),
        (document(state=[]), "Expected `object`"),
        (document(state={"m": {"$": "tensor", "name": "gone"}}), "'gone' that is not listed"),
        (document(session=[{"$": "tensor", "name": "gone"}]), "'gone' that is not listed"),
        (document(session=[{"$": "tensor"}]), "without a name"),
        (b"[]", "JSON object"),
        (b"", "not JSON"),
        (b'{"format":1,"requires":[],"session":NaN}', "NaN"),
        (b'{"format":1,"format":1}', "same key twice"),
        (b"[" * 100_000, "nested deeper"),
        (document(format=None), "format number"),
        (document(requires=None), "requirements"),
    ],
)
def test_what_contradicts_itself_is_damage(data: bytes, says: str) -> None:
    """Each with its reason; nobody after `decode_index` needs to check anything again."""
    with pytest.raises(DamagedCheckpoint, match=says) as caught:
        decode(data)
    assert (caught.value.checkpoint, caught.value.file) == ("c", "index-00000.json")


@pytest.mark.parametrize("member", [*DOCUMENT])
def test_no_member_may_be_missing(member: str) -> None:
    """A default would be a guess."""
    with pytest.raises(DamagedCheckpoint):
        decode(json.dumps({name: value for name, value in DOCUMENT.items() if name != member}).encode())


def test_unknown_members_are_ignored() -> None:
    """Everywhere."""
    files = [{**entry, "new": 1} for entry in DOCUMENT["files"]]
    tensors = [
        {**tensor, "new": 1, "slices": [{**part, "new": []} for part in tensor["slices"]]}
        for tensor in DOCUMENT["tensors"]
    ]
    assert decode(document(files=files, tensors=tensors, new={"$": 1})) == example()


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (document(format=2), "format 2"),
        (document(requires=["tiles"]), "format 1, tiles"),
        (document(algorithm="blake4"), "digests blake4"),
        (tensors_with(0, dtype="float2"), "dtype float2"),
        (tensors_with(0, role="adapter"), "role adapter"),
    ],
)
def test_words_of_a_newer_version_are_not_damage(data: bytes, found: str) -> None:
    """The bytes were verified before: whoever wrote them knew more than this version does."""
    with pytest.raises(UnsupportedFormat, match=r"c/index-00000\.json was written by a newer") as caught:
        decode(data)
    assert caught.value.found == found


def test_an_index_that_contradicts_itself_is_not_written() -> None:
    """The mistake is found before the checkpoint is published."""
    tensor = msgspec.structs.replace(example().tensors[0], name="v")
    for changes, says in [
        ({"tensors": (*example().tensors, tensor)}, "share byte"),
        ({"tensors": ()}, "not listed"),
        ({"tensors": (msgspec.structs.replace(tensor, dtype="qint8"),)}, "qint8"),
        ({"session": float("nan")}, "JSON"),
        ({"session": "\ud800"}, "surrogate"),
    ]:
        with pytest.raises(ValueError, match=says):
            encode_index(example(**changes))


def test_the_size_is_bounded_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader never takes more into memory than the format allows."""
    assert MAX_BYTES == 1 << 28
    monkeypatch.setattr("spotsafe.checkpoint.index.MAX_BYTES", 100)
    with pytest.raises(ValueError, match="keep large values as arrays"):
        encode_index(example())
    with pytest.raises(DamagedCheckpoint, match="larger than 100"):
        decode(document())


class TestSeveralRanks:
    """An index is what one rank wrote; together they make the tensors."""

    @staticmethod
    def of_rank(rank: int, *, shape: tuple[int, ...] = (4,), offset: int = 0, length: int = 2) -> Index:
        """Half of a tensor."""
        file = f"data-{rank:05d}-000.safetensors"
        slices = (piece(0, (length,), offsets=(offset,), file=file),) if length else ()
        return Index(
            rank=rank,
            block_size=4096,
            files=(FileEntry(name=file, size=16, digests=("0" * 32,)),),
            tensors=(TensorEntry(name="w", dtype="float32", shape=shape, slices=slices),),
        )

    def test_a_part_alone_is_not_complete(self) -> None:
        """The reader says which of the two it expects."""
        index = self.of_rank(0)
        assert decode(encode_index(index), complete=False) == index
        with pytest.raises(DamagedCheckpoint, match="exactly once"):
            decode(encode_index(index))

    def test_parts_that_make_the_whole_are_fine(self) -> None:
        """Also a rank that has nothing of a tensor."""
        parts = [self.of_rank(0), self.of_rank(1, offset=2), self.of_rank(2, length=0)]
        assert tiling_problem(parts) is None

    def test_a_gap_an_overlap_and_a_disagreement_are_named(self) -> None:
        """What a publishing coordinator must find before the manifest exists."""
        assert tiling_problem([self.of_rank(0)]) == "'w': its slices do not cover it exactly once"
        overlap = [self.of_rank(0), self.of_rank(1, offset=1, length=3)]
        assert tiling_problem(overlap) == "'w': its slices do not cover it exactly once"
        differing = [self.of_rank(0), self.of_rank(1, shape=(5,), offset=2)]
        assert tiling_problem(differing) == "'w': ranks disagree about its dtype or shape"


def test_garbage_collection_is_left_as_it_was() -> None:
    """It is paused for the time of a decode, also when that fails, and only if it was on."""
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            decode(document())
            with pytest.raises(DamagedCheckpoint):
                decode(b"{")
            assert gc.isenabled() == enabled
        finally:
            gc.enable()


def nodes(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(inner for key, item in items for inner in nodes(item, (*path, key)))]


PATHS = nodes(DOCUMENT)[1:]
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from([FILE, "w", "$"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["$", "name", "x"]), inner),
    max_leaves=5,
)


@given(st.sampled_from(PATHS), values, st.booleans())
@settings(max_examples=400)
def test_any_value_may_be_anything(path: tuple[Any, ...], value: Any, drop: bool) -> None:
    """A document changed in any one place is an index, or one of two errors, and nothing else."""
    changed = json.loads(json.dumps(DOCUMENT))
    at = changed
    for key in path[:-1]:
        at = at[key]
    if drop:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    try:
        back = decode(json.dumps(changed).encode())
    except (DamagedCheckpoint, UnsupportedFormat):
        return
    assert decode(encode_index(back)) == back


def outcome(data: bytes) -> tuple[str, Any]:
    """The index, or the error in its words."""
    try:
        return "index", decode(data)
    except (DamagedCheckpoint, UnsupportedFormat) as error:
        return type(error).__name__, str(error)


def both_ways(data: bytes) -> bool:
    """See that a file is the same index, or the same error, without the fast way; whether it went that way."""
    proven = index_document._proven(data)
    with mock.patch.object(index_document, "_proven", return_value=None):
        slow = outcome(data)
    assert outcome(data) == slow
    if slow[0] == "index":
        assert repr(decode(data)) == repr(slow[1])
    return proven is not None


@given(st.sampled_from(PATHS), values, st.booleans())
@settings(max_examples=200)
def test_the_fast_way_is_as_strict(path: tuple[Any, ...], value: Any, twice: bool) -> None:
    """A file as this package writes it, with any one value changed or any one member there twice."""
    changed = json.loads(json.dumps(DOCUMENT))
    at = changed
    for key in path[:-1]:
        at = at[key]
    if twice and isinstance(at, dict):
        at["twice"] = at[path[-1]]
        data = json.dumps(changed, separators=(",", ":")).replace('"twice"', json.dumps(path[-1])).encode()
        assert not both_ways(data)
    else:
        at[path[-1]] = value
        both_ways(json.dumps(changed, separators=(",", ":"), ensure_ascii=False).encode())


@given(st.integers(0, 10_000), st.integers(0, 255))
@settings(max_examples=200)
def test_the_fast_way_is_as_strict_with_any_byte(position: int, byte: int) -> None:
    """Of a file as this package writes it."""
    changed = bytearray(encode_index(with_reference()))
    changed[position % len(changed)] = byte
    both_ways(bytes(changed))


@pytest.mark.parametrize("index", [example(), with_reference()])
def test_what_this_package_writes_is_read_the_fast_way(index: Index) -> None:
    """With an end of line or without; not if anything is there that is not looked at."""
    data = encode_index(index)
    assert both_ways(data)
    assert both_ways(data[:-1])
    for other in (
        data + b"\n",
        b" " + data,
        data.replace(b'"rank"', b'"new":1,"rank"', 1),
        data[:-2] + b" }",
    ):
        assert not both_ways(other)


def test_the_depth_counts_from_the_whole_document() -> None:
    """Whichever way it is read."""
    for depth in (strict_json.MAX_DEPTH - 1, strict_json.MAX_DEPTH):
        data = encode_index(example()).replace(b'"session":{', b'"session":' + b"[" * depth + b"{", 1)
        both_ways(data[:-2] + b"]" * depth + b"}\n")
        nested = encode_index(example()).partition(b'"session":')[0]
        both_ways(nested + b'"session":' + b"[" * depth + b"]" * depth + b"}\n")
    assert outcome(nested + b'"session":' + b"[" * depth + b"]" * depth + b"}\n")[0] == "DamagedCheckpoint"


@given(st.binary(max_size=100), st.integers(0, 10_000), st.integers(0, 255))
@settings(max_examples=150)
def test_any_bytes_are_an_index_or_one_of_two_errors(data: bytes, position: int, value: int) -> None:
    """Random files, and a good one with a byte changed (which the manifest's SHA-256 would find first)."""
    changed = bytearray(document())
    changed[position % len(changed)] = value
    for file in (data, bytes(changed)):
        try:
            decode(file)
        except (DamagedCheckpoint, UnsupportedFormat):
            continue


def test_a_row_of_saves_gives_the_same_bytes_as_each_alone() -> None:
    """What is known of the index before spares work, and changes no byte; also after one that was refused."""
    last, first = EncodedIndex(), example()
    one, other = ({**first.state, "more": {"n": number}} for number in (1, 1.0))
    smaller = dataclasses.replace(first, tensors=first.tensors[1:])
    row = (
        first,
        first,
        dataclasses.replace(first, state=one),
        dataclasses.replace(first, state=other),
        dataclasses.replace(first, session={"positions": {}}),
        with_reference(),
        Index(rank=3, block_size=1, files=(), tensors=()),
        first,
    )
    for index in row:
        assert encode_index(index, last=last) == encode_index(index)
        for _ in range(2):
            with pytest.raises(ValueError, match="'w' that is not listed"):
                encode_index(smaller, last=last)
        assert encode_index(index, last=last) == encode_index(index)


def test_a_tree_that_is_kept_gives_the_bytes_of_a_plain_one() -> None:
    """Whether its bytes are kept or made; what it refers to must be there each time the tensors are others."""
    last, first = EncodedIndex(), example()
    tree = {
        "kind": "module",
        "state": {'é"\n\\': {"$": "tensor", "name": "w"}},
        "metadata": {"": {"version": 1}},
    }
    plain = dataclasses.replace(first, state={"model": tree, "a\x7f": {"n": [1.5, None]}})
    kept = dataclasses.replace(plain, state={**plain.state, "model": KeptTree(tree)})
    for index in (kept, kept, plain, kept):
        assert encode_index(index, last=last) == encode_index(plain)
        for _ in range(2):
            with pytest.raises(ValueError, match="'w' that is not listed"):
                encode_index(dataclasses.replace(index, tensors=first.tensors[1:]), last=last)


def test_a_plain_tree_may_change() -> None:
    """Only what says so is taken for the same because it is the same object."""
    last, tree = EncodedIndex(), {"n": 1}
    index = dataclasses.replace(example(), state={"model": tree})
    encode_index(index, last=last)
    tree["n"] = 2
    assert encode_index(index, last=last) == encode_index(index)


def test_state_is_as_deep_as_a_document_may_be() -> None:
    """No deeper, counted from the names of what is tracked on."""
    tree: Any = 1
    for _ in range(MAX_DEPTH - 1):
        tree = [tree]
    encode_index(dataclasses.replace(example(), state={"deep": tree}))
    with pytest.raises(ValueError, match="nested deeper"):
        encode_index(dataclasses.replace(example(), state={"deep": [tree]}))


def test_names_of_state_are_text() -> None:
    """Nothing else is a key of JSON."""
    with pytest.raises(TypeError, match="text"):
        encode_index(dataclasses.replace(example(), state={1: {}}))  # type: ignore[dict-item] # the mistake under test
