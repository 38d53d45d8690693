"""Code that stands still at each of its storage operations until somebody says what the store answers.

The code runs in a thread of its own, which hands over to its owner whenever it asks the store for something: at
any moment only one of the two runs. So nothing depends on how the machine schedules threads, and code that does
not look at clocks or random numbers of its own does the same thing whenever it gets the same answers.
"""

from __future__ import annotations

import builtins
import itertools
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from spotsafe.errors import StorageError
from spotsafe.identity import NONCES
from spotsafe.storage.store import Entry


class Killed(BaseException):
    """The process is gone. Raised at its storage operation, and at every later one."""


@dataclass(frozen=True, slots=True)
class Request:
    """A storage operation that waits for its answer."""

    name: str
    """The store's method."""
    path: str
    data: bytes = b""
    """What is to be written."""
    offset: int = 0
    length: int = 0
    """Bytes that are wanted at most."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer is this error."""

    kind: type[StorageError]
    text: str


Answer = Any
"""What the store's method returns - bytes for `read_into` - or a `Failure`. Hashable."""


class ParkedStore:
    """A `Store` of which each operation is a request to the owner of its process."""

    exclusive: bool | None = True

    def __init__(self, ask: Callable[[Request], Answer]) -> None:
        self._ask = ask

    @property
    def url(self) -> str:
        """Where it is, for people."""
        return "parked://run"

    def put(self, path: str, data: bytes) -> None:
        """See `Store.put`."""
        self._ask(Request("put", path, bytes(data)))

    def put_large(self, path: str, data: memoryview) -> None:
        """See `Store.put_large`."""
        self._ask(Request("put_large", path, bytes(data)))

    def create(self, path: str, data: bytes) -> bool:
        """See `Store.create`."""
        return bool(self._ask(Request("create", path, bytes(data))))

    def replace(self, path: str, data: bytes) -> None:
        """See `Store.replace`."""
        self._ask(Request("replace", path, bytes(data)))

    def read(self, path: str, *, max_bytes: int) -> bytes:
        """See `Store.read`."""
        return bytes(self._ask(Request("read", path, length=max_bytes)))

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read_into`."""
        buffer[:] = self._ask(Request("read_into", path, offset=offset, length=len(buffer)))

    def size(self, path: str) -> int:
        """See `Store.size`."""
        return int(self._ask(Request("size", path)))

    def names(self, folder: str) -> builtins.list[str]:
        """See `Store.names`."""
        return builtins.list(self._ask(Request("names", folder)))

    def delete(self, path: str) -> None:
        """See `Store.delete`."""
        self._ask(Request("delete", path))

    def begun(self, folder: str) -> builtins.list[str]:
        """See `Store.begun`."""
        return builtins.list(self._ask(Request("begun", folder)))

    def abort_uploads(self, folder: str) -> None:
        """See `Store.abort_uploads`."""
        self._ask(Request("abort_uploads", folder))

    def list(self, folder: str) -> builtins.list[Entry]:
        """See `Store.list`."""
        return builtins.list(self._ask(Request("list", folder)))

    def overwriting(self) -> ParkedStore:
        """The same store as one that ignores conditions: it creates over what is there, and says that it was not."""
        return _OverwritingStore(self._ask)


class _OverwritingStore(ParkedStore):
    exclusive = None

    def create(self, path: str, data: bytes) -> bool:
        self._ask(Request("overwrite", path, bytes(data)))
        return True


@dataclass(frozen=True, slots=True)
class Machine:
    """What a process is given."""

    store: ParkedStore
    note: Callable[..., None]
    """Tells the rules something that the store's operations do not show: ``note("resumed from", name)``."""
    damage: Callable[[str], None]
    """Changes a stored object for good, as a bad disk does; a switch point like any other operation."""
    rest: Callable[[], None]
    """Lets so much time pass that every heart beats; a switch point too."""
    lose: Callable[[str], None]
    """Takes an object away, as a person does who should not; a switch point too."""


Body = Callable[[Machine], None]
"""The code of a process."""


class Process:
    """Code that runs until its next storage operation and waits there.

    Args:
        name: what it is called; its nonces follow from the name and their number.
        body: the code. It must not share memory with other processes.
        answers: what the store answered to the first operations, to bring it to where another one was.

    Raises:
        BaseException: what the code raised before its first operation.

    Attributes:
        request: what it asks the store for; None when it has ended.
        noted: what it told through `Machine.note` since the last answer.
        error: what its code raised, once it has ended.
    """

    def __init__(self, name: str, body: Body, *, answers: Iterable[Answer] = ()) -> None:
        self.name = name
        self.request: Request | None = None
        self.noted: list[tuple[Any, ...]] = []
        self.error: BaseException | None = None
        self._body = body
        self._known: Iterator[Answer] = iter(answers)
        self._answer: Answer = None
        self._dead = False
        self._thread = 0
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        threading.Thread(target=self._run, name=f"process-{name}", daemon=True).start()
        self._back.acquire()
        if self.error is not None:
            raise self.error  # before it asked for anything: no schedule will ever show it

    def answer(self, answer: Answer) -> None:
        """Let it go on with this answer; returns when it stands at its next operation, or has ended."""
        self.noted = []
        self._answer = answer
        self._switch()

    def kill(self) -> None:
        """End it where it stands: it does nothing any more, whatever its `finally` blocks try."""
        if self.request is not None:
            self._dead = True
            self._switch()

    def _switch(self) -> None:
        self._go.release()
        self._back.acquire()

    def _run(self) -> None:
        self._thread = threading.get_ident()
        NONCES.set(nonces(self.name))
        machine = Machine(
            store=ParkedStore(self._ask),
            note=self._note,
            damage=lambda path: self._ask(Request("damage", path)),
            rest=lambda: self._ask(Request("rest", "")),
            lose=lambda path: self._ask(Request("lose", path)),
        )
        try:
            self._body(machine)
        except BaseException as error:  # noqa: BLE001 - SystemExit too: whoever owns the process judges it
            self.error = error.with_traceback(None)
        self.request = None
        self._back.release()

    def _ask(self, request: Request) -> Answer:
        if self._dead:
            raise Killed
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                f"{self.name} asks for {request.name} {request.path} in a second thread; it has one"
            )
        try:
            answer = next(self._known)
            self.noted = []
        except StopIteration:
            self.request = request
            self._back.release()
            self._go.acquire()
            if self._dead:
                raise Killed from None
            answer = self._answer
        if isinstance(answer, Failure):
            raise answer.kind(answer.text, path=request.path)
        return answer

    def _note(self, *words: Any) -> None:
        if not self._dead:
            self.noted.append(words)


def nonces(name: str) -> Callable[[], str]:
    """Nonces for `NONCES` that follow from a name and their number."""
    numbers = itertools.count(1)
    return lambda: f"{zlib.crc32(name.encode()) & 0xFFFF:04x}{next(numbers):04x}"
