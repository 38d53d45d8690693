"""The error tree: what is drawn is what is there, and who can catch what."""

from __future__ import annotations

import builtins
import inspect
import pickle
import re

import pytest

from spotsafe import errors
from spotsafe.errors import (
    EXIT_RECLAIMED,
    EXIT_RESTART_LOOP,
    EXIT_SUPERSEDED,
    DamagedCheckpoint,
    NoUsableCheckpoint,
    Reclaimed,
    RestartLoop,
    SaveFailed,
    SpotsafeError,
    StateMismatch,
    StorageError,
    StorageNotFound,
    StorageUnavailable,
    Superseded,
    UnsupportedFormat,
    UnsupportedState,
)

LINE = re.compile(r"^ {4}(?P<bars>[| ]*)(?:\|--|`--) (?P<name>\w+)(?: \((?P<bases>[\w, ]+)\))?(?: |$)")
ROOT = re.compile(r"^ {4}(?P<name>\w+)$")
LEAVING = [Reclaimed, Superseded, RestartLoop]


def drawn() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Of every class in the docstring's drawing: the class above it, and the built-ins behind its name."""
    tree: dict[str, tuple[str, tuple[str, ...]]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if root := ROOT.match(line):
            path = [root["name"]]
        elif entry := LINE.match(line):
            depth = len(entry["bars"]) // 4 + 1
            path = [*path[:depth], entry["name"]]
            bases = tuple(entry["bases"].split(", ")) if entry["bases"] else ()
            tree[entry["name"]] = (path[-2], bases)
    return tree


def real() -> dict[str, tuple[str, tuple[str, ...]]]:
    """The same of the classes themselves; private classes between are left out."""
    tree = {}
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and kind.__module__ == errors.__name__ and not name.startswith("_"):
            bases = [base for base in kind.__mro__[1:] if not base.__name__.startswith("_")]
            ours = [base.__name__ for base in kind.__bases__ if base.__module__ == errors.__name__]
            parent = ours[0] if ours and not ours[0].startswith("_") else bases[0].__name__
            extra = (base.__name__ for base in kind.__bases__ if base.__module__ == "builtins")
            tree[name] = (parent, tuple(one for one in extra if one not in {parent, "Exception"}))
    return tree


def test_the_drawing_is_the_tree() -> None:
    """Every class is drawn at its place with the built-in that it also is, and nothing else is drawn."""
    expected = {name: place for name, place in real().items() if name != "SpotsafeError"}

    assert drawn() == expected


def test_every_error_is_documented() -> None:
    """Each class says when it is raised."""
    for name in drawn():
        assert (getattr(errors, name).__doc__ or "").strip(), name


def test_built_ins_catch_ours() -> None:
    """Somebody who knows nothing of spotsafe catches its errors by the built-in that fits."""
    for name, (_, bases) in drawn().items():
        for base in bases:
            assert issubclass(getattr(errors, name), getattr(builtins, base))


@pytest.mark.parametrize("kind", LEAVING)
def test_except_exception_does_not_catch_leaving(kind: type[SystemExit]) -> None:
    """A training loop's `except Exception` cannot swallow the end of the process."""

    def body() -> None:
        try:
            raise kind
        except Exception:
            pytest.fail("caught")

    with pytest.raises(kind):
        body()
    assert not issubclass(kind, SpotsafeError | Exception)


@pytest.mark.parametrize(
    ("kind", "code"),
    [(Reclaimed, EXIT_RECLAIMED), (Superseded, EXIT_SUPERSEDED), (RestartLoop, EXIT_RESTART_LOOP)],
)
def test_leaving_has_a_code_and_words(kind: type[SystemExit], code: int) -> None:
    """The interpreter ends with the code, a person reads the message."""
    error = kind("because")

    assert error.code == code
    assert str(error) == "because"


def test_the_codes_differ() -> None:
    """A launcher can tell the three apart, and none is 0 or 1, which mean other things."""
    codes = {EXIT_RECLAIMED, EXIT_SUPERSEDED, EXIT_RESTART_LOOP}

    assert codes == {143, 94, 93}


def test_a_reclaim_may_have_another_code() -> None:
    """Some launchers restart on another number."""
    assert Reclaimed(code=99).code == 99


def test_not_found_is_no_outage() -> None:
    """ "There is none" and "could not look" are never caught by the same specific class."""
    assert not issubclass(StorageNotFound, StorageUnavailable | ConnectionError)
    assert not issubclass(StorageUnavailable, StorageNotFound | FileNotFoundError)
    assert issubclass(StorageNotFound, StorageError)


def test_attributes() -> None:
    """Errors carry what a program needs, so that nobody parses messages."""
    assert StorageNotFound("gone", path="a/b").path == "a/b"
    assert NoUsableCheckpoint("none", url="u", reasons={"a": "torn"}).reasons == {"a": "torn"}
    assert UnsupportedFormat("new", checkpoint="c", found="2").found == "2"
    assert UnsupportedState("a lambda", path="scheduler.f").path == "scheduler.f"
    assert StateMismatch("differs", problems=["w: shape"]).problems == ("w: shape",)
    assert SaveFailed("failed", failures=["step 3"]).failures == ("step 3",)

    damaged = DamagedCheckpoint(checkpoint="c", file="manifest.json", reason="cut short")
    assert (damaged.checkpoint, damaged.file, damaged.reason) == ("c", "manifest.json", "cut short")
    assert str(damaged) == "c/manifest.json: cut short"


@pytest.mark.parametrize("kind", [StorageNotFound, StorageUnavailable, StateMismatch, SaveFailed])
def test_messages_survive_pickling(kind: type[SpotsafeError]) -> None:
    """Launchers and pools pickle an error to show it elsewhere."""
    assert str(pickle.loads(pickle.dumps(kind("what to do next")))) == "what to do next"


@pytest.mark.parametrize(
    "error",
    [
        DamagedCheckpoint(checkpoint="c", file="f", reason="r"),
        *(kind("because") for kind in LEAVING),
        Reclaimed("because", code=99),
    ],
)
def test_errors_with_other_arguments_survive_pickling(error: BaseException) -> None:
    """Also those whose arguments are not their message."""
    again = pickle.loads(pickle.dumps(error))

    assert type(again) is type(error)
    assert str(again) == str(error)
    for name in ("code", "checkpoint", "file", "reason"):
        assert getattr(again, name, None) == getattr(error, name, None)
