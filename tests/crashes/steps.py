"""What a life does, step by step, with a crash or a lost answer at one of them.

A step is a storage operation, a request to the server, or a system call that changes the disk.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar
from unittest import mock
from urllib.parse import urlsplit

from botocore.exceptions import ConnectionClosedError

from spotsafe.errors import StorageUnavailable
from spotsafe.storage.store import Store
from spotsafe.storage.wrapping import Operation, WrappingStore
from tests.killed import Crash

T = TypeVar("T")
Kind = Literal["before", "after", "lost", "lost twice"]
KINDS: tuple[Kind, ...] = ("before", "after", "lost", "lost twice")


def crash() -> None:
    """What a crash is in a process that has to live on."""
    raise Crash


class Steps:
    """Counts steps, and lets one of them go wrong.

    After a crash no step is made any more, whatever code still runs: on storage it is as if the process were gone.

    Args:
        at: which step, from 1; 0 for none.
        kind: ``"before"``: a crash, and the step was never made; ``"after"``: it was made, and a crash; ``"lost"``:
            it was made, and there is an error instead of its answer; ``"lost twice"``: so for the next step too, with
            which a client tries again.
        die: does not return.

    Attributes:
        made: all steps that were begun.
        fired: whether it went wrong.
        unanswered: the first two steps that end in this get no answer, besides: those are a request and the client's
            own second try.
    """

    def __init__(self, at: int = 0, kind: Kind = "before", *, die: Callable[[], object] = crash) -> None:
        self.made: list[str] = []
        self.fired = False
        self.unanswered = ""
        self._at, self._kind, self._die, self._dead = at, kind, die, False
        self._last = at + (kind == "lost twice")

    def aim(self, at: int) -> None:
        """Let this step go wrong instead, counted from now on."""
        self._last += len(self.made) + at - self._at
        self._at = len(self.made) + at

    def make(self, what: str, do: Callable[[], T], *, lost: Callable[[], Exception]) -> T:
        """Make a step, or let it go wrong; `lost` is the error of an answer that never came."""
        self.made.append(what)
        here = self._at <= len(self.made) <= self._last
        unanswered = bool(self.unanswered) and what.endswith(self.unanswered)
        if self._dead or (here and self._kind == "before"):
            self._end()
        try:
            return do()
        finally:  # also after one that was refused: that too is an answer
            if here and self._kind == "after":
                self._end()
            self.fired = self.fired or here
            if here or (unanswered and sum(one.endswith(self.unanswered) for one in self.made) <= 2):
                raise lost()

    def _end(self) -> None:
        self._dead = self.fired = True
        self._die()


class Operations(WrappingStore):
    """Each call of the store is a step."""

    def __init__(self, inner: Store, steps: Steps) -> None:
        super().__init__(inner)
        self._steps = steps

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """A step."""
        return self._steps.make(
            f"{operation.name} {operation.path}", call, lost=lambda: StorageUnavailable("the answer was lost")
        )


class Wire:
    """Stands for botocore's HTTP session: each request is a step, sent again or not.

    Args:
        session: the one that does the work.

    Attributes:
        steps: where they are made; may be changed.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self.steps = Steps()

    def send(self, request: Any) -> Any:
        """What botocore calls for each request."""
        parts = urlsplit(request.url)
        query = "&".join(one for one in parts.query.split("&") if not one.startswith("uploadId"))
        answers: list[Any] = []

        def send() -> Any:
            answers.append(self._session.send(request))
            return answers[0]

        try:
            return self.steps.make(
                f"{request.method} {parts.path}?{query}",
                send,
                lost=lambda: ConnectionClosedError(endpoint_url=request.url),
            )
        except BaseException:
            for answer in answers:  # nobody will read it
                answer.raw.drain_conn()
                answer.raw.release_conn()
            raise

    def close(self) -> None:
        """As of the session."""
        self._session.close()


_CALLS = ("write", "ftruncate", "fdatasync", "fsync", "link", "unlink", "rename", "mkdir", "rmdir")


class _InOperation(WrappingStore):
    """Knows whether this thread is inside an operation of the store."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._local = threading.local()

    @property
    def inside(self) -> bool:
        return getattr(self._local, "inside", False)

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        self._local.inside = True
        try:
            return call()
        finally:
            self._local.inside = False


@contextmanager
def system_calls(store: Store, steps: Steps) -> Iterator[Store]:
    """The store, whose system calls that change the disk are steps for as long as this is open."""
    watched = _InOperation(store)

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            changes = name != "open" or args[1] & os.O_CREAT
            if not (watched.inside and changes):
                return call(*args, **kwargs)
            return steps.make(f"{name} {args[0]}", lambda: call(*args, **kwargs), lost=OSError)

        return made

    with mock.patch.multiple(os, **{name: counted(name, getattr(os, name)) for name in (*_CALLS, "open")}):
        yield watched
