"""A store as a value: what an operation does to it, and everything that may go wrong with the operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from spotsafe.errors import StorageError, StorageExists, StorageNotFound, StorageShort, StorageUnavailable
from spotsafe.storage.store import Entry
from spotsafe.testing.parking import Answer, Failure, Request

Objects = Mapping[str, bytes]
"""What is stored, by path. Never changed: an effect makes a new one."""

DONE: Final = ""
FAIL: Final = "fail"
LOST: Final = "lost"
LATE: Final = "late"
KILL: Final = "kill"
KILL_DONE: Final = "kill-done"
KILL_LATE: Final = "kill-late"
STALE: Final = "stale"
BLIND: Final = "blind"
WRONG: Final = "wrong"
LIE: Final = "lie"
SHORT: Final = "short"

FATES: Final[Mapping[str, str]] = {
    DONE: "done",
    FAIL: "not done, and the answer is an error",
    LOST: "done, but the answer is lost",
    LATE: "the answer is lost; done at some later moment, or never",
    KILL: "not done, for the process is dead",
    KILL_DONE: "done, and then the process is dead",
    KILL_LATE: "the process is dead; done at some later moment, or never",
    STALE: "a listing that shows an earlier moment",
    BLIND: "a listing that shows nothing",
    WRONG: "one bit of what is read is wrong, this once",
    LIE: "answered as done, and not done",
    SHORT: "answered as done, but the last byte is not kept",
}
"""What may become of an operation."""

_EFFECTS = frozenset({"put", "put_large", "create", "overwrite", "replace", "delete"})
_LISTINGS = frozenset({"list", "names"})
_READS = frozenset({"read", "read_into"})
_OF = {
    LOST: _EFFECTS,
    LATE: _EFFECTS,
    KILL_DONE: _EFFECTS,
    KILL_LATE: _EFFECTS,
    STALE: _LISTINGS,
    BLIND: _LISTINGS,
    WRONG: _READS,
    LIE: frozenset({"delete", "replace"}),
    SHORT: frozenset({"put", "put_large"}),
}


class _Dead:
    """There is no answer: nobody waits for it any more."""


DEAD: Final = _Dead()


@dataclass(frozen=True, slots=True)
class Late:
    """An operation whose effect is still under way."""

    who: str
    request: Request


@dataclass(frozen=True, slots=True)
class Cloud:
    """The store at one moment."""

    objects: Objects
    late: tuple[Late, ...] = ()
    past: tuple[Objects, ...] = ()
    """Earlier moments, the oldest first; only kept if listings may be stale."""


def may(fate: str, request: Request) -> bool:
    """Whether this can become of such an operation."""
    kinds = _OF.get(fate)
    if request.name in {"damage", "lose", "rest"}:
        return fate in {DONE, KILL}
    return kinds is None or request.name in kinds


def perform(
    cloud: Cloud, who: str, request: Request, *, fate: str = DONE, back: int = 0
) -> tuple[Cloud, Answer]:
    """Let it happen.

    Args:
        cloud: the store before.
        who: the process that asks.
        request: what it asks for.
        fate: one of `FATES`.
        back: for a stale listing, how many moments it is behind.

    Returns:
        The store after, and the answer; `DEAD` for a process that was killed.
    """
    if fate in {KILL, FAIL, LIE, LATE, KILL_LATE}:
        if fate in {LATE, KILL_LATE}:
            cloud = replace(cloud, late=(*cloud.late, Late(who, request)))
        if fate == LIE:
            return cloud, None
        return cloud, _unavailable(request) if fate in {FAIL, LATE} else DEAD
    if fate == STALE:
        return cloud, apply(cloud.past[-back], request)[1]
    if fate == BLIND:
        return cloud, ()
    if fate == SHORT:
        request = replace(request, data=request.data[:-1])
    objects, answer = apply(cloud.objects, request)
    cloud = _moved(cloud, objects)
    if fate == WRONG and isinstance(answer, bytes):
        answer = _flipped(answer)
    if fate == KILL_DONE:
        answer = DEAD
    elif fate == LOST:
        answer = _unavailable(request)
    return cloud, answer


def land(cloud: Cloud, place: int) -> Cloud:
    """Let the effect of a late operation happen."""
    late = cloud.late[place]
    left = cloud.late[:place] + cloud.late[place + 1 :]
    return replace(_moved(cloud, apply(cloud.objects, late.request)[0]), late=left)


def apply(objects: Objects, request: Request) -> tuple[Objects, Answer]:
    """What an operation does when nothing goes wrong: the objects after it, and its answer."""
    return _HANDLERS[request.name](objects, request)


def _moved(cloud: Cloud, objects: Objects) -> Cloud:
    if objects is cloud.objects:
        return cloud
    return Cloud(objects, cloud.late, (*cloud.past, cloud.objects))


def _unavailable(request: Request) -> Failure:
    return Failure(StorageUnavailable, f"no answer to {request.name} {request.path}")


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if data else data


def _put(objects: Objects, request: Request) -> tuple[Objects, Answer]:
    if request.path in objects:
        return objects, Failure(StorageExists, f"{request.path} exists already")
    return {**objects, request.path: request.data}, None


def _create(objects: Objects, request: Request) -> tuple[Objects, Answer]:
    found = objects.get(request.path)
    if found is not None:
        return objects, found == request.data
    return {**objects, request.path: request.data}, True


def _replace(objects: Objects, request: Request) -> tuple[Objects, Answer]:
    return {**objects, request.path: request.data}, None


def _delete(objects: Objects, request: Request) -> tuple[Objects, Answer]:
    if request.path not in objects:
        return objects, None
    return {path: data for path, data in objects.items() if path != request.path}, None


def _damage(objects: Objects, request: Request) -> tuple[Objects, Answer]:
    if request.path not in objects:
        return objects, None
    return {**objects, request.path: _flipped(objects[request.path])}, None


def _nothing(objects: Objects, request: Request) -> tuple[Objects, Answer]:  # noqa: ARG001 - one form for all
    return objects, None


def _read(objects: Objects, request: Request) -> tuple[Objects, Answer]:
    data = objects.get(request.path)
    if data is None:
        return objects, _missing(request)
    if len(data) > request.length:
        text = f"{request.path} has {len(data)} bytes, more than {request.length}"
        return objects, Failure(StorageError, text)
    return objects, data


def _read_into(objects: Objects, request: Request) -> tuple[Objects, Answer]:
    data = objects.get(request.path)
    if data is None:
        return objects, _missing(request)
    found = data[request.offset : request.offset + request.length]
    if len(found) < request.length:
        return objects, Failure(StorageShort, f"{request.path} ends before {request.offset + request.length}")
    return objects, found


def _size(objects: Objects, request: Request) -> tuple[Objects, Answer]:
    data = objects.get(request.path)
    return objects, _missing(request) if data is None else len(data)


def _list(objects: Objects, request: Request) -> tuple[Objects, Answer]:
    prefix = f"{request.path}/" if request.path else ""
    found = (Entry(path, len(data)) for path, data in objects.items() if path.startswith(prefix))
    return objects, tuple(sorted(found))


def _names(objects: Objects, request: Request) -> tuple[Objects, Answer]:
    prefix = f"{request.path}/" if request.path else ""
    start = len(prefix)
    found = {path[start:].partition("/")[0] for path in objects if path.startswith(prefix)}
    return objects, tuple(sorted(found))


def _missing(request: Request) -> Failure:
    return Failure(StorageNotFound, f"{request.path} does not exist")


_HANDLERS: Mapping[str, Callable[[Objects, Request], tuple[Objects, Answer]]] = {
    "put": _put,
    "put_large": _put,
    "create": _create,
    "overwrite": _replace,
    "replace": _replace,
    "read": _read,
    "read_into": _read_into,
    "size": _size,
    "names": _names,
    "delete": _delete,
    "abort_uploads": _nothing,
    "begun": lambda objects, _: (objects, ()),
    "list": _list,
    "damage": _damage,
    "lose": _delete,
    "rest": _nothing,
}
