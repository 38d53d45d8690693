"""Sealed files: every bit of them is covered, and the seal is compared before anything is parsed."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings, strategies as st

from spotsafe.checkpoint import sealed

DATA = sealed.seal({"format": 1, "name": "x", "list": [1, 2.5, None]})
LIMIT = 1 << 20


def reseal(body: bytes) -> bytes:
    """The file whose text is `body`, in which the digest stands as zeros."""
    return body.replace(b"0" * 64, hashlib.sha256(body).hexdigest().encode(), 1)


def test_a_sealed_file_opens() -> None:
    """The members come back in order, without the digest."""
    assert sealed.unseal(DATA, max_bytes=LIMIT) == {"format": 1, "name": "x", "list": [1, 2.5, None]}


def test_the_seal_is_what_the_format_says() -> None:
    """First member, SHA-256 of the bytes with 64 zeros in its place: anybody can recompute it."""
    assert DATA.startswith(b'{"sha256":"')
    zeroed = DATA[:11] + b"0" * 64 + DATA[75:]
    assert DATA[11:75].decode() == hashlib.sha256(zeroed).hexdigest()
    assert reseal(zeroed) == DATA


def test_every_flipped_bit_is_found() -> None:
    """Also in the digest itself, where a flip can turn a letter into its capital."""
    for position in range(len(DATA)):
        for bit in range(8):
            damaged = bytearray(DATA)
            damaged[position] ^= 1 << bit
            with pytest.raises(ValueError, match="SHA-256"):
                sealed.unseal(bytes(damaged), max_bytes=LIMIT)


def test_every_truncation_and_every_appended_byte_is_found() -> None:
    """Whatever a broken copy leaves."""
    for length in range(len(DATA)):
        with pytest.raises(ValueError, match="SHA-256"):
            sealed.unseal(DATA[:length], max_bytes=LIMIT)
    for byte in b" \n\0}":
        with pytest.raises(ValueError, match="SHA-256"):
            sealed.unseal(DATA + bytes([byte]), max_bytes=LIMIT)


@given(st.binary(max_size=100) | st.binary(max_size=60).map(lambda tail: DATA[:76] + tail))
@settings(max_examples=100)
def test_any_bytes_are_a_value_error(data: bytes) -> None:
    """Nothing else comes out."""
    with pytest.raises(ValueError, match=r"."):
        sealed.unseal(data, max_bytes=LIMIT)


@pytest.mark.parametrize("tail", ["", ",", ',"a":1,"a":2}', ',"a":NaN}', "}x", ',"sha256":"x"}'])
def test_a_correct_seal_around_bad_json_is_a_value_error(tail: str) -> None:
    """The digest proves that these are the bytes that were written, not that they make sense."""
    with pytest.raises(ValueError, match=r"JSON|same key"):
        sealed.unseal(reseal(b'{"sha256":"' + b"0" * 64 + b'"' + tail.encode()), max_bytes=LIMIT)


def test_size_is_bounded_before_anything_is_read() -> None:
    """A file of a gigabyte is refused by its length alone."""
    with pytest.raises(ValueError, match="larger than 10 bytes"):
        sealed.unseal(DATA, max_bytes=10)


def test_the_digest_is_not_a_member_to_give() -> None:
    """Two first members would make two meanings."""
    with pytest.raises(ValueError, match="sha256"):
        sealed.seal({"sha256": "0"})
