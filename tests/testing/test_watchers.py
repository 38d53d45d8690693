"""The suite for watchers passes what is right and fails what is not."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from spotsafe.errors import WatcherUnavailable
from spotsafe.reclaim.notice import NoticeKind, ReclaimNotice
from spotsafe.testing.watchers import ScriptedWatcher, WatcherConformance

Poll = Callable[["World"], ReclaimNotice | None]


def notice(received: float, *, source: str = "mine", kind: NoticeKind = NoticeKind.RECLAIM) -> ReclaimNotice:
    return ReclaimNotice(source=source, kind=kind, action="stop", deadline=None, received=received)


class World:
    """A source in memory, and a watcher of it whose faults can be chosen."""

    name = "mine"
    interval_s = 0.01

    def __init__(self, behave: Poll) -> None:
        self.state = "quiet"
        self.first: ReclaimNotice | None = None
        self._behave = behave

    def poll(self) -> ReclaimNotice | None:
        return self._behave(self)

    def close(self) -> None:
        pass


def right(world: World) -> ReclaimNotice | None:
    if world.state == "broken":
        raise WatcherUnavailable("no answer", source="mine")
    if world.state == "quiet":
        world.first = None
    elif world.first is None:
        world.first = notice(time.monotonic())
    return world.first


def blind_is_nothing(world: World) -> ReclaimNotice | None:
    return None if world.state == "broken" else right(world)


def moving(world: World) -> ReclaimNotice | None:
    return right(world) and notice(time.monotonic())


def sticky(world: World) -> ReclaimNotice | None:
    return world.first if world.first and world.state == "quiet" else right(world)


def nameless_error(world: World) -> ReclaimNotice | None:
    if world.state == "broken":
        raise WatcherUnavailable("no answer")
    return right(world)


def raw_error(world: World) -> ReclaimNotice | None:
    if world.state == "broken":
        raise ConnectionRefusedError("no answer")
    return right(world)


def only_a_risk(world: World) -> ReclaimNotice | None:
    return right(world) and notice(world.first.received if world.first else 0.0, kind=NoticeKind.RISK)


def anothers_name(world: World) -> ReclaimNotice | None:
    return right(world) and notice(world.first.received if world.first else 0.0, source="other")


def suite(behave: Poll) -> WatcherConformance:
    class Suite(WatcherConformance):
        def __init__(self) -> None:
            self.world = World(behave)

        def make_watcher(self) -> World:
            return self.world

        def quiet(self) -> None:
            self.world.state = "quiet"

        def announce(self) -> None:
            self.world.state = "announced"

        def break_(self) -> None:
            self.world.state = "broken"

    return Suite()


TESTS = [name for name in dir(WatcherConformance) if name.startswith("test_")]


@pytest.mark.parametrize("name", TESTS)
def test_a_right_watcher_passes(name: str):
    """The suite asks for nothing that a simple, right watcher does not do."""
    getattr(suite(right), name)()


@pytest.mark.parametrize(
    ("behave", "name"),
    [
        (blind_is_nothing, "test_cannot_ask_is_not_nothing"),
        (nameless_error, "test_cannot_ask_is_not_nothing"),
        (raw_error, "test_cannot_ask_is_not_nothing"),
        (moving, "test_the_same_announcement_is_the_same_notice"),
        (sticky, "test_what_is_gone_is_cancelled"),
        (only_a_risk, "test_a_notice_is_complete"),
        (anothers_name, "test_a_notice_is_complete"),
    ],
)
def test_a_wrong_watcher_fails(behave: Poll, name: str):
    """Each fault that matters is found by the test that is about it."""
    with pytest.raises((AssertionError, pytest.fail.Exception, OSError)):
        getattr(suite(behave), name)()


def test_a_scripted_watcher_plays_its_script():
    """Each poll does what comes next, the last thing for ever, and `then` begins a new script."""
    first = notice(1.0)
    watcher = ScriptedWatcher(first, ValueError("x"), None)
    assert watcher.poll() is first
    with pytest.raises(ValueError, match="x"):
        watcher.poll()
    assert [watcher.poll(), watcher.poll()] == [None, None]
    watcher.then(first)
    assert [watcher.poll(), watcher.poll()] == [first, first]
    assert watcher.polls == 6
    assert not watcher.closed
    watcher.close()
    assert watcher.closed
