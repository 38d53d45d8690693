"""From what a user writes to a store."""

from __future__ import annotations

import os
from collections.abc import Callable

from spotsafe.storage.local import LocalStore
from spotsafe.storage.retrying import RetryingStore
from spotsafe.storage.store import Store

_LOCAL = ("file://", "local://")
# Two spellings of one place must give one key.
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfss": "abfs", "az": "abfs", "adl": "abfs"}


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
        ValueError: the url's protocol is unknown.
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
        return RetryingStore(LocalStore(path), deadline=deadline)
    from spotsafe.storage.remote import FsspecStore  # noqa: PLC0415 - runs on a local disk need no fsspec

    return RetryingStore(FsspecStore(text), deadline=deadline)


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
