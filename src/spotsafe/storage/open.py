"""From what a user writes to a store."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spotsafe.errors import StorageError
from spotsafe.storage.local import LocalStore
from spotsafe.storage.retrying import RetryingStore
from spotsafe.storage.store import Store

_LOCAL = ("file://", "local://")
_S3 = ("s3://", "s3a://")
# Two spellings of one place must give one key.
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfss": "abfs", "az": "abfs", "adl": "abfs"}
_HALF_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
_PACKAGES = ("s3fs", "gcsfs", "adlfs", "fsspec")

S3_CLIENT = "SPOTSAFE_S3_CLIENT"
"""Environment variable: ``obstore``, ``boto3`` or ``s3fs``, if it shall not be the best that is installed."""


def open_store(
    target: str | os.PathLike[str] | Store, *, deadline: Callable[[], float | None] | None = None
) -> Store:
    """The store that `target` names. Nothing is made or contacted before it is used.

    Args:
        target: a path (a leading ``~`` is expanded), ``file://...``, any fsspec url, or a `Store`, which is
            returned as it is.
        deadline: see `RetryingStore`.

    Raises:
        TypeError: neither a path, nor a url, nor a `Store`.
        ValueError: the url's protocol is unknown, or has one slash behind it; or `S3_CLIENT` names no client.
        StorageNotFolder: the path is a file.
        StorageError: the package for the protocol is not installed, or the place cannot be looked at.
    """
    if not isinstance(target, (str, os.PathLike)):
        if not isinstance(target, Store):
            raise TypeError(f"the url of a run is a path, an fsspec url or a Store, got {target!r}")
        return target
    text = os.fspath(target)
    path = local_path(text)
    if path is not None:
        _refuse_half_url(text)
        return RetryingStore(LocalStore(path), deadline=deadline)
    return RetryingStore(_remote(text), deadline=deadline)


def _refuse_half_url(text: str) -> None:
    """``s3:/bucket`` would be a folder of this machine, and the checkpoints would go with it."""
    if _HALF_URL.match(text):
        protocol, _, rest = text.partition(":/")
        raise ValueError(
            f"{text}: a url has two slashes, {protocol}://{rest}; for a folder of this name write ./{text}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reopening:
    """What another process on this host needs to open the same run by `open_store`."""

    url: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of fsspec, plain values; they may hold secrets. For `use_settings`."""


def reopening(target: str | os.PathLike[str] | Store) -> Reopening | None:
    """How another process opens what `target` names; None if it cannot.

    A `Store` that somebody made is an object of this process. So is what lies in its memory, or behind a file system
    that only this program has registered. Environment variables are inherited, and need not be told.
    """
    if not isinstance(target, (str, os.PathLike)):
        return None
    text = os.fspath(target)
    path = local_path(text)
    if path is not None:
        return Reopening(url=os.path.abspath(path))
    protocol = text.partition("://")[0].lower()
    if "::" in text or protocol not in {*_ALIASES, *_ALIASES.values()} or not _is_nobodys_own(protocol):
        return None
    try:
        settings = json.loads(json.dumps(_settings()))
    except (TypeError, ValueError):
        return None
    return Reopening(url=text, settings=settings)


def use_settings(settings: Mapping[str, Any]) -> None:
    """Set what another process had set for fsspec; before `open_store`."""
    if settings:
        from fsspec import config  # noqa: PLC0415 - only where a program has settings

        config.conf.clear()
        config.conf.update(settings)


def _settings() -> Mapping[str, Any]:
    """What fsspec goes by. If nobody has imported it, the other process finds the same files and variables."""
    config = sys.modules.get("fsspec.config")
    return {} if config is None else config.conf


def _is_nobodys_own(protocol: str) -> bool:
    """Whether the file system of a protocol is the one that everybody has."""
    registry = sys.modules.get("fsspec.registry")
    kind = None if registry is None else registry.registry.get(protocol)
    return kind is None or kind.__module__.partition(".")[0] in _PACKAGES


def _remote(url: str) -> Store:
    """S3 by the best client that is installed, or the one that `S3_CLIENT` names; the rest by fsspec."""
    if url.lower().startswith(_S3):
        wanted = os.environ.get(S3_CLIENT, "")
        if wanted not in {"", *_S3_CLIENTS}:
            raise ValueError(f"{S3_CLIENT} is one of {', '.join(_S3_CLIENTS)}, not {wanted!r}")
        for client, make in _S3_CLIENTS.items():
            if wanted in {"", client}:
                try:
                    return make(url)
                except ImportError as cause:
                    missing = cause
        if wanted:
            raise StorageError(f"{url}: {S3_CLIENT} asks for {wanted}: {missing}", path=url)
    return _by_fsspec(url)


def _by_obstore(url: str) -> Store:
    from spotsafe.storage.fast import FastS3Store  # noqa: PLC0415 - an optional package

    return FastS3Store(url)


def _by_boto3(url: str) -> Store:
    from spotsafe.storage.s3 import S3Store  # noqa: PLC0415 - an optional package

    return S3Store(url)


def _by_fsspec(url: str) -> Store:
    from spotsafe.storage.remote import FsspecStore  # noqa: PLC0415 - runs on a local disk need no fsspec

    return FsspecStore(url)


_S3_CLIENTS: dict[str, Callable[[str], Store]] = {
    "obstore": _by_obstore,
    "boto3": _by_boto3,
    "s3fs": _by_fsspec,
}
"""Best first."""


def local_path(url: str) -> str | None:
    """The path that a url or path names on this machine, or None if it is elsewhere."""
    for prefix in _LOCAL:
        if url.startswith(prefix):
            return os.path.expanduser(url[len(prefix) :])
    return None if "://" in url or "::" in url else os.path.expanduser(url)


def same_place(url: str) -> str:
    """A key that is equal for two spellings of the same place, to find two sessions on one run.

    Links and relative parts of local paths are resolved. What cannot be known (two buckets that are one) is
    not.
    """
    path = local_path(url)
    if path is not None:
        return "file://" + os.path.realpath(path)
    protocol, separator, rest = url.partition("://")
    protocol = protocol.lower()
    return _ALIASES.get(protocol, protocol) + separator + rest.strip("/")
