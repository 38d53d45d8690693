"""Small JSON files that carry the digest of their own bytes, such as manifests: believed whole or not at all.

A JSON document with one flipped bit parses to something else about half of the time (measured), so the digest
is compared before anything is parsed. The first member is ``"sha256"``; its value is the SHA-256, in
lowercase hexadecimal, of all bytes of the file with those 64 characters replaced by ``0``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spotsafe.checkpoint import strict_json
from spotsafe.checkpoint.digest import sha256_hex

_HEAD = b'{"sha256":"'
_ZEROS = b"0" * 64
_START = len(_HEAD)
_END = _START + 64


def seal(members: Mapping[str, Any]) -> bytes:
    """The file that holds `members`, in their order, behind its own digest.

    Raises:
        ValueError: a member named ``sha256``, or a value that strict JSON cannot hold.
    """
    if "sha256" in members:
        raise ValueError("the member sha256 is made by seal itself")
    body = strict_json.dump({"sha256": _ZEROS.decode(), **members}) + b"\n"
    return body[:_START] + sha256_hex(body).encode() + body[_END:]


def unseal(data: bytes, *, max_bytes: int) -> dict[str, Any]:
    """The members of a sealed file, without its digest.

    Args:
        data: the whole file.
        max_bytes: what such a file may have at most.

    Raises:
        ValueError: the bytes are not those that were sealed; the text says what differs.
    """
    if len(data) > max_bytes:
        raise ValueError(f"larger than {max_bytes} bytes")
    if data[:_START] != _HEAD or data[_END : _END + 1] != b'"':
        raise ValueError("does not begin with its own SHA-256: cut short, or not written by spotsafe")
    if sha256_hex(data[:_START] + _ZEROS + data[_END:]).encode() != data[_START:_END]:
        raise ValueError("its bytes do not match its own SHA-256")
    members = strict_json.parse(data)
    if type(members) is not dict:
        raise ValueError("not a JSON object")
    del members["sha256"]
    return members
