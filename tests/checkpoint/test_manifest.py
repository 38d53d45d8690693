"""Manifests and markers: exact round trips, and one error for everything that is not what was published."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from spotsafe.checkpoint import manifest as format_
from spotsafe.checkpoint.layout import CheckpointName, index_file
from spotsafe.checkpoint.manifest import (
    Health,
    Manifest,
    Marker,
    Part,
    Reference,
    decode,
    encode_manifest,
    encode_marker,
)
from spotsafe.errors import DamagedCheckpoint, UnsupportedFormat

NAME = CheckpointName(12, 300, 41, "7f3a9c21")
PARENT = str(CheckpointName(11, 250, 3, "00112233"))


def example(**changes: Any) -> Manifest:
    """A manifest with something in every member, changed."""
    fields: dict[str, Any] = {
        "run": "5ca1ab1e",
        "attempt": 12,
        "step": 300,
        "save": 41,
        "nonce": "7f3a9c21",
        "parent": PARENT,
        "created": 1764500000.25,
        "world_size": 2,
        "reason": "interval",
        "health": Health(healthy=False, nonfinite=("w", "\u03b2"), nonfinite_buffers=("mean",)),
        "metrics": {"val_loss": 0.5, "bad": math.nan, "": -math.inf, "$": 1.0},
        "parts": tuple(
            Part(rank=rank, file=index_file(rank), size=1000 + rank, sha256=f"{rank:064x}")
            for rank in range(2)
        ),
        "total_bytes": 123_456,
    }
    return Manifest(**{**fields, **changes})


def reseal(members: Any) -> bytes:
    """The file of any members, with a correct digest."""
    body = json.dumps({"sha256": "0" * 64, **members}, separators=(",", ":")).encode()
    return body.replace(b"0" * 64, hashlib.sha256(body).hexdigest().encode(), 1)


def members_of(data: bytes) -> dict[str, Any]:
    """The members of a file without its digest."""
    members: dict[str, Any] = json.loads(data)
    del members["sha256"]
    return members


MEMBERS = members_of(encode_manifest(example(metrics={"val_loss": 0.5})))


def test_a_manifest_comes_back() -> None:
    """All members, NaN and infinite metrics too."""
    back = decode(encode_manifest(example()), expected=NAME)
    assert isinstance(back, Manifest)
    assert math.isnan(back.metrics["bad"])
    assert repr(back) == repr(example())
    assert back.name == NAME


finite = st.floats(allow_nan=False, allow_infinity=False)
digests = st.text("0123456789abcdef", min_size=64, max_size=64)


manifests = st.builds(
    example,
    run=st.text(min_size=1),
    step=st.integers(0, 10**12),
    reason=st.text(),
    created=finite,
    metrics=st.dictionaries(st.text(max_size=5), st.floats(), max_size=4),
    parts=st.lists(digests, max_size=4).map(
        lambda shas: tuple(
            Part(rank=rank, file=index_file(rank), size=1 << (rank * 10), sha256=sha)
            for rank, sha in enumerate(shas)
        )
    ),
    world_size=st.integers(4, 1 << 20),
    health=st.builds(
        Health, healthy=st.booleans(), nonfinite=st.lists(st.text(max_size=5), max_size=3).map(tuple)
    ),
)


@given(manifests)
@settings(max_examples=80)
def test_any_manifest_comes_back(one: Manifest) -> None:
    """Text of any kind, large numbers, any number of parts."""
    back = decode(encode_manifest(one), expected=one.name)
    assert repr(back) == repr(one)


def test_the_bytes_are_what_the_format_says() -> None:
    """These bytes lie on people's disks: version 1 must not drift."""
    data = encode_manifest(
        example(health=Health(healthy=True), metrics={"a": 1.0, "b": math.inf}, parts=(), parent=None)
    )
    zeroed = data[:11] + b"0" * 64 + data[75:]
    assert zeroed == (
        b'{"sha256":"' + b"0" * 64 + b'","format":1,"requires":[],"run":"5ca1ab1e","attempt":12,"step":300,'
        b'"save":41,"nonce":"7f3a9c21","parent":null,"created":1764500000.25,"world_size":2,'
        b'"reason":"interval","health":{"healthy":true,"nonfinite":[],"nonfinite_buffers":[]},'
        b'"metrics":{"a":1.0,"b":{"$":"float","value":"inf"}},"parts":[],"total_bytes":123456}\n'
    )
    assert hashlib.sha256(zeroed).hexdigest().encode() == data[11:75]


@pytest.mark.parametrize(
    "marker",
    [
        Marker(state="abandoned"),
        Marker(state="retired", in_use=("data-00000-000.safetensors", "data-00001-002.safetensors")),
    ],
)
def test_a_marker_comes_back(marker: Marker) -> None:
    """It says nothing of the checkpoint's name: what lies in the folder is what it is about."""
    assert decode(encode_marker(marker), expected=NAME) == marker


@pytest.mark.parametrize("data", [encode_manifest(example()), encode_marker(Marker(state="abandoned"))])
def test_every_flipped_bit_and_every_truncation_is_damage(data: bytes) -> None:
    """Half of such flips would still parse."""
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << (position % 8)
        for damaged in (bytes(flipped), data[:position]):
            with pytest.raises(DamagedCheckpoint) as caught:
                decode(damaged, expected=NAME)
            assert (caught.value.checkpoint, caught.value.file) == (str(NAME), "manifest.json")


def test_another_checkpoint_s_manifest_is_damage() -> None:
    """A folder that was copied under another name is not that checkpoint."""
    for other in (CheckpointName(12, 300, 42, "7f3a9c21"), CheckpointName(12, 300, 41, "7f3a9c22")):
        with pytest.raises(DamagedCheckpoint, match=f"belongs to {NAME}"):
            decode(encode_manifest(example()), expected=other)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"run": ""}, "run"),
        ({"run": None}, "Expected `str`"),
        ({"attempt": "12"}, "Expected `int`"),
        ({"attempt": 12.0}, "Expected `int`"),
        ({"attempt": True}, "Expected `int`"),
        ({"step": -300}, "belongs to"),
        ({"parent": "../x"}, "parent"),
        ({"parent": 3}, "Expected"),
        ({"created": {"$": "float", "value": "nan"}}, "Expected"),
        ({"created": "1"}, "Expected"),
        ({"world_size": 0}, "world"),
        ({"world_size": 1 << 63}, "world"),
        ({"total_bytes": -1}, "bytes of data"),
        ({"total_bytes": 10**4000}, "bytes of data"),
        ({"health": {}}, "healthy"),
        ({"health": {"healthy": 1}}, "Expected `bool`"),
        ({"health": {"healthy": True, "nonfinite": [1]}}, "Expected `str`"),
        ({"metrics": []}, "metrics"),
        ({"metrics": {"a": "1"}}, "metric 'a'"),
        ({"metrics": {"a": 1}}, "metric 'a'"),
        ({"metrics": {"a": {"$": "float", "value": "1.0"}}}, "metric 'a'"),
        ({"metrics": {"a": {"$": "int", "value": "nan"}}}, "metric 'a'"),
        ({"metrics": {"a": {"$": "float", "value": []}}}, "metric 'a'"),
        ({"parts": {}}, "Expected `array`"),
        ({"parts": [1]}, "Expected `object`"),
        ({"parts": MEMBERS["parts"] * 2}, "two parts of one rank"),
        ({"world_size": 1}, "rank 1, but"),
        ({"parts": [{**MEMBERS["parts"][0], "file": "index-00001.json"}]}, "rank 0's index"),
        ({"parts": [{**MEMBERS["parts"][0], "file": "../index-00000.json"}]}, "rank 0's index"),
        ({"parts": [{**MEMBERS["parts"][0], "size": 0}]}, "0 bytes"),
        ({"parts": [{**MEMBERS["parts"][0], "sha256": "0" * 63}]}, "SHA-256"),
        ({"parts": [{**MEMBERS["parts"][0], "sha256": "A" * 64}]}, "SHA-256"),
        ({"parts": [{**MEMBERS["parts"][0], "rank": -1}]}, "rank -1"),
        ({"format": None}, "format number"),
        ({"requires": None}, "requirements"),
        ({"state": 3}, "Expected `str`"),
    ],
)
def test_members_of_a_wrong_kind_are_damage_even_under_a_correct_digest(changes: Any, says: str) -> None:
    """Nobody after `decode` needs to check anything again."""
    with pytest.raises(DamagedCheckpoint, match=says):
        decode(reseal({**MEMBERS, **changes}), expected=NAME)


@pytest.mark.parametrize(
    "member", sorted(MEMBERS.keys() & {item.name for item in dataclasses.fields(Manifest)})
)
def test_no_member_may_be_missing(member: str) -> None:
    """A default would be a guess."""
    members = {name: value for name, value in MEMBERS.items() if name != member}
    with pytest.raises(DamagedCheckpoint, match=f"lacks {member}"):
        decode(reseal(members), expected=NAME)


OWNER = CheckpointName(2, 100, 3, "89abcdef")
REFERENCES = (
    Reference(checkpoint=str(OWNER), file="frozen-00000-000.safetensors", size=10),
    Reference(checkpoint=str(OWNER), file="frozen-00000-001.safetensors", size=20),
)


def test_references_come_back_and_are_required() -> None:
    """Whoever does not know of references must not delete what this one needs, so it says so where all look."""
    manifest = dataclasses.replace(example(metrics={}), references=REFERENCES)
    data = encode_manifest(manifest)
    assert members_of(data)["requires"] == ["references"]
    back = decode(data, expected=NAME)
    assert back == manifest
    assert isinstance(back, Manifest)
    assert back.needed_bytes == back.total_bytes + 30
    assert back.references[0].path == f"{OWNER.folder}/frozen-00000-000.safetensors"
    assert "references" not in members_of(encode_manifest(example()))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"requires": []}, "without requiring"),
        (
            {"references": [{"checkpoint": "../../x", "file": REFERENCES[0].file, "size": 1}]},
            "no checkpoint's name",
        ),
        (
            {"references": [{"checkpoint": str(NAME), "file": REFERENCES[0].file, "size": 1}]},
            "its own folder",
        ),
        (
            {"references": [{"checkpoint": str(OWNER), "file": "../manifest.json", "size": 1}]},
            "no file that it may",
        ),
        (
            {"references": [{"checkpoint": str(OWNER), "file": "index-00000.json", "size": 1}]},
            "no file that it may",
        ),
        (
            {"references": [{"checkpoint": str(OWNER), "file": "data-00000-000.safetensors", "size": 1}]},
            "may",
        ),
        ({"references": [{"checkpoint": str(OWNER), "file": REFERENCES[0].file, "size": -1}]}, "-1 bytes"),
        ({"references": [{"checkpoint": str(OWNER), "file": REFERENCES[0].file}]}, "size"),
        ({"references": [{"checkpoint": str(OWNER), "file": REFERENCES[0].file, "size": 1}] * 2}, "twice"),
        ({"references": {}}, "array"),
    ],
)
def test_references_that_mean_nothing_are_damage(changes: Any, says: str) -> None:
    """Only names of the format's own, never paths, and nothing that retention would not see."""
    members = members_of(encode_manifest(dataclasses.replace(example(metrics={}), references=REFERENCES)))
    with pytest.raises(DamagedCheckpoint, match=says):
        decode(reseal({**members, **changes}), expected=NAME)


def test_unknown_members_are_ignored() -> None:
    """A later version may add what older ones need not know."""
    part = {**MEMBERS["parts"][0], "new": 1}
    health = {**MEMBERS["health"], "new": {"x": []}}
    back = decode(reseal({**MEMBERS, "new": [1], "parts": [part], "health": health}), expected=NAME)
    assert back == example(metrics={"val_loss": 0.5}, parts=example().parts[:1])


@pytest.mark.parametrize(
    ("members", "found"),
    [
        ({**MEMBERS, "format": 2}, "format 2"),
        ({**MEMBERS, "requires": ["shards"]}, "format 1, shards"),
        ({"format": 3, "requires": [], "anything": 1}, "format 3"),
        ({"format": 1, "requires": [], "state": "moved"}, "state moved"),
    ],
)
def test_a_newer_format_is_not_damage(members: Any, found: str) -> None:
    """It stops the start: no walk back to an older checkpoint, and nothing is deleted."""
    with pytest.raises(UnsupportedFormat, match="upgrade") as caught:
        decode(reseal(members), expected=NAME)
    assert (caught.value.found, caught.value.checkpoint) == (found, str(NAME))


@pytest.mark.parametrize("in_use", [["x"], ["../data-00000-000.safetensors"], "x", [1]])
def test_a_marker_with_names_that_are_none_is_damage(in_use: Any) -> None:
    """Names from a file are used as paths only after a strict pattern."""
    with pytest.raises(DamagedCheckpoint):
        decode(reseal({"format": 1, "requires": [], "state": "retired", "in_use": in_use}), expected=NAME)


@pytest.mark.parametrize(
    "changes",
    [
        {"nonce": "x"},
        {"parent": "x"},
        {"created": math.inf},
        {"world_size": 0},
        {"run": "\ud800"},
        {"metrics": {"\ud800": 1.0}},
        {"parts": (Part(rank=0, file="x", size=1, sha256="0" * 64),)},
    ],
)
def test_what_could_not_be_read_is_not_written(changes: Any) -> None:
    """The mistake is found before the checkpoint is published, not at the resume."""
    with pytest.raises(ValueError, match=r"."):
        encode_manifest(example(**changes))
    with pytest.raises(ValueError, match="unknown state"):
        encode_marker(Marker(state="moved"))


def test_the_size_is_bounded_on_both_sides() -> None:
    """One MiB: a reader never takes more into memory."""
    with pytest.raises(ValueError, match="metrics"):
        encode_manifest(example(metrics={f"metric-{number:07d}": 0.1 for number in range(60_000)}))
    with pytest.raises(DamagedCheckpoint, match="larger than"):
        decode(reseal({**MEMBERS, "new": "x" * format_.MAX_BYTES}), expected=NAME)


def test_integer_metrics_are_numbers() -> None:
    """Whoever reports an accuracy of 1 means 1.0."""
    back = decode(encode_manifest(example(metrics={"accuracy": 1})), expected=NAME)
    assert isinstance(back, Manifest)
    assert isinstance(back.metrics["accuracy"], float)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(max_size=6) | st.just(str(NAME)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(MEMBERS)), json_values, st.booleans())
@settings(max_examples=300)
def test_any_member_may_be_anything(member: str, value: Any, drop: bool) -> None:
    """Under a correct digest: a manifest, or one of two errors, and nothing else."""
    members = {**MEMBERS, member: value}
    if drop:
        del members[member]
    try:
        back = decode(reseal(members), expected=NAME)
    except (DamagedCheckpoint, UnsupportedFormat):
        return
    assert isinstance(back, Manifest)
    assert decode(encode_manifest(back), expected=NAME) == back


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=150)
def test_any_bytes_are_damage(data: bytes) -> None:
    """Without a digest nothing is believed."""
    with pytest.raises(DamagedCheckpoint):
        decode(data, expected=NAME)
