"""A file system of fsspec that nobody else has, and how it is asked.

Made when it is first used, one in each process (they do not survive a fork), without a cache of listings (they go
stale), on an event loop of its own, and made anew when its credentials have expired.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs
from fsspec.spec import AbstractFileSystem

from spotsafe.storage.clients import Client, forget_finalizers
from spotsafe.storage.eventloop import PrivateLoop, gather

_SMALL_S = 120.0
"""Seconds that a request may take which moves little, with the client's own retries."""
_SLOWEST = 256 * 1024
"""Bytes a second that even a bad connection moves; they give a large request its limit."""


@dataclass(slots=True)
class _Opened:
    fs: Any
    root: str
    loop: PrivateLoop | None
    is_tame: bool = False
    """Whether what the client had arranged for its end is taken back."""


class Connection:
    """The file system of a url, in whichever process we are. Safe to use from several threads.

    Args:
        url: any fsspec url.
        client: what the protocol's client needs.
        kind: the class of the file system.
        options: the user's storage options, which go over those of `client`.
    """

    def __init__(
        self, url: str, *, client: Client, kind: type[AbstractFileSystem], options: dict[str, Any]
    ) -> None:
        self._url = url
        self._client = client
        self._kind = kind
        self._options = {**client.options, **options}
        self._by_process: dict[int, _Opened] = {}

    @property
    def root(self) -> str:
        """The url as the file system writes it, without a slash at its end."""
        return self._opened().root

    @property
    def is_asynchronous(self) -> bool:
        """Whether the file system works by coroutines, on our loop."""
        return self._opened().loop is not None

    def call(self, name: str, *args: Any, moves: int = 0, **kwargs: Any) -> Any:
        """Call a method of the file system and wait for its result.

        Args:
            name: of the method, like ``"cat_file"``.
            *args: handed to it.
            moves: bytes that travel with the request or its answer, for its time limit.
            **kwargs: handed to it.

        Raises:
            TimeoutError: no answer came in time, or the request was cancelled: what became of it is not known.
        """
        coroutine = self._coroutine(name)
        if coroutine is None:
            return getattr(self._opened().fs, name)(*args, **kwargs)
        return self.run(lambda _fs: coroutine(*args, **kwargs), moves=moves)

    def call_each(
        self,
        name: str,
        calls: Iterable[tuple[dict[str, Any], Callable[[Any], None]]],
        *,
        at_once: int,
        moves: int,
    ) -> None:
        """Call a method several times, some at once where the client can, and hand on each result as it comes.

        Args:
            name: of the method.
            calls: keyword arguments of each call, and who takes its result.
            at_once: how many calls may be under way.
            moves: bytes that all of them move.
        """
        coroutine = self._coroutine(name)
        if coroutine is None:
            for kwargs, take in calls:
                take(getattr(self._opened().fs, name)(**kwargs))
            return
        jobs = (partial(_then, coroutine, kwargs, take) for kwargs, take in calls)
        self.run(lambda _fs: gather(jobs, at_once=at_once), moves=moves)

    def run(self, make: Callable[[Any], Coroutine[Any, Any, Any]], *, moves: int = 0) -> Any:
        """The result of a coroutine that `make` makes of the file system, on its loop; see `call`."""
        opened = self._opened()
        assert opened.loop is not None, "only an asynchronous file system has coroutines"
        try:
            return opened.loop.run(make(opened.fs), timeout_s=_SMALL_S + moves / _SLOWEST)
        finally:
            if not opened.is_tame:
                opened.is_tame = True
                forget_finalizers(opened.fs)

    def renew(self) -> None:
        """Let go of the file system; the next call makes a new one, which looks for credentials anew."""
        opened = self._by_process.get(os.getpid())
        if opened is not None:
            fs, root = self._make(opened.loop)
            self._by_process[os.getpid()] = _Opened(fs, root, opened.loop)

    def close(self) -> None:
        """Close the connections of this process. Nobody may be using them; the next call opens new ones."""
        opened = self._by_process.pop(os.getpid(), None)
        if opened is not None and opened.loop is not None:
            opened.loop.close()

    def _coroutine(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]] | None:
        """The coroutine function behind a method, if that is how this file system does it on our loop."""
        opened = self._opened()
        inner = getattr(getattr(opened.fs, name), "__wrapped__", None)
        if opened.loop is None or not inspect.iscoroutinefunction(inner):
            return None
        found: Callable[..., Coroutine[Any, Any, Any]] = getattr(opened.fs, f"_{name}")
        return found

    def _opened(self) -> _Opened:
        """The file system of this process. Two threads that come first at once may make two; one is kept."""
        pid = os.getpid()
        found = self._by_process.get(pid)
        if found is None:
            is_private = issubclass(self._kind, AsyncFileSystem) and "loop" not in self._options
            loop = PrivateLoop(self) if is_private else None
            mine = _Opened(*self._make(loop), loop)
            found = self._by_process.setdefault(pid, mine)
            if found is not mine and loop is not None:
                loop.close()
        return found

    def _make(self, loop: PrivateLoop | None) -> tuple[Any, str]:
        options = {**self._options, "skip_instance_cache": True, "use_listings_cache": False}
        if loop is not None:
            options["loop"] = loop.loop
        fs, root = url_to_fs(self._url, **options)
        if loop is not None and isinstance(fs, self._kind):
            self._client.prepare(fs)
            loop.goodbyes.append(partial(_goodbye, self._client, fs))
        return fs, root.rstrip("/")


async def _then(
    coroutine: Callable[..., Coroutine[Any, Any, Any]], kwargs: dict[str, Any], take: Callable[[Any], None]
) -> None:
    take(await coroutine(**kwargs))


async def _goodbye(client: Client, fs: Any) -> None:
    forget_finalizers(fs)
    await client.close(fs)
