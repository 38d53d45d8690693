"""Events are values; the fan-out reaches every sink and lets nothing out; process-wide sinks."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import threading
from collections.abc import Iterator

import pytest

from spotsafe import events
from spotsafe.events import CallableSink, Event, EventSink, Fanout, SaveStarted, Warned
from spotsafe.testing.sinks import EventSinkConformance, RecordingSink, event_types, sample_events

EVENT = Warned(message="one")


@pytest.fixture(autouse=True)
def nothing_installed() -> Iterator[None]:
    """No test leaves a sink behind for the next."""
    before = events.installed()
    yield
    assert events.installed() == before


class Broken:
    """A sink that always raises."""

    def emit(self, event: Event) -> None:
        raise RuntimeError("broken sink")


# -- values


@pytest.mark.parametrize("event", sample_events(), ids=lambda event: type(event).__name__)
def test_events_are_values(event: Event) -> None:
    """Frozen, equal by content, hashable, and the same after pickling."""
    assert dataclasses.replace(event) == event  # type: ignore[type-var]  # every event is a dataclass
    assert hash(dataclasses.replace(event)) == hash(event)  # type: ignore[type-var]  # every event is one
    assert pickle.loads(pickle.dumps(event)) == event
    for field in dataclasses.fields(event):  # type: ignore[arg-type]  # every event is a dataclass
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(event, field.name, None)


@pytest.mark.parametrize("kind", event_types(), ids=lambda kind: kind.__name__)
def test_events_say_what_they_mean(kind: type[Event]) -> None:
    """Each type has a sentence, and takes its fields by name only."""
    assert (kind.__doc__ or "").endswith(".")
    with pytest.raises(TypeError):
        kind("by position")  # type: ignore[call-arg]  # the mistake is the test


# -- the fan-out


def test_every_sink_gets_every_event_in_order() -> None:
    """Sinks are called one after the other, in the order in which they were added."""
    calls: list[tuple[str, Event]] = []
    fanout = Fanout([CallableSink(lambda event: calls.append(("first", event)))])
    fanout.add(CallableSink(lambda event: calls.append(("second", event))))
    other = Warned(message="two")

    fanout.emit(EVENT)
    fanout.emit(other)

    assert calls == [("first", EVENT), ("second", EVENT), ("first", other), ("second", other)]


def test_a_broken_sink_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """What a sink raises reaches neither the caller nor the sinks behind it."""
    behind = RecordingSink()
    fanout = Fanout([Broken(), behind])

    for _ in range(3):
        fanout.emit(EVENT)

    assert behind.events == [EVENT] * 3


def test_a_broken_sink_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """One log entry with the traceback; not one for every event of a long run."""
    fanout = Fanout([Broken(), Broken()])

    with caplog.at_level(logging.ERROR, logger="spotsafe"):
        for _ in range(5):
            fanout.emit(EVENT)

    assert len(caplog.records) == 2
    assert all("broken sink" in (record.exc_text or "") for record in caplog.records)


class Death(BaseException):
    """What no `except Exception` sees."""


def raising(error: type[BaseException]) -> CallableSink:
    def fail(_: Event) -> None:
        raise error

    return CallableSink(fail)


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, Death])
def test_what_is_no_exception_is_held_back_too(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """A `sys.exit()` in a logger must not end a training run without a last save."""
    behind = RecordingSink()
    fanout = Fanout([raising(error), behind])

    with caplog.at_level(logging.ERROR, logger="spotsafe"):
        fanout.emit(EVENT)

    assert behind.events == [EVENT]
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_a_log_that_is_broken_too_stops_nobody() -> None:
    """The sink that fails may be the one that logs: reporting it fails in the same way."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise SystemExit

    logger, handler = logging.getLogger("spotsafe"), Handler()
    logger.addHandler(handler)
    behind = RecordingSink()
    try:
        Fanout([Broken(), behind]).emit(EVENT)
    finally:
        logger.removeHandler(handler)

    assert behind.events == [EVENT]


def test_ctrl_c_gets_through_when_all_sinks_have_had_the_event() -> None:
    """It is for the program, wherever in its main thread it comes; the ledger behind still learns what happened."""
    behind = RecordingSink()

    with pytest.raises(KeyboardInterrupt):
        Fanout([raising(KeyboardInterrupt), behind]).emit(EVENT)

    assert behind.events == [EVENT]


def test_in_another_thread_there_is_no_ctrl_c() -> None:
    """There a KeyboardInterrupt is the sink's own doing, and would end the writer or the ledger."""
    behind = RecordingSink()
    raised: list[BaseException] = []

    def emit() -> None:
        try:
            Fanout([raising(KeyboardInterrupt), behind]).emit(EVENT)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=emit)
    thread.start()
    thread.join()

    assert raised == []
    assert behind.events == [EVENT]


def test_an_empty_fanout_does_nothing() -> None:
    """A session without sinks is legal."""
    Fanout().emit(EVENT)


# -- sinks of the process


def test_installed_sinks_are_seen_in_order_until_taken_out() -> None:
    """`install` adds at the end; what it returns takes exactly that sink out, also when called twice."""
    first, second = RecordingSink(), RecordingSink()

    remove_first = events.install(first)
    remove_second = events.install(second)
    assert events.installed() == (first, second)

    remove_first()
    remove_first()
    assert events.installed() == (second,)
    remove_second()


def test_sinks_are_told_apart_by_identity() -> None:
    """Two sinks that are equal are still two."""

    class Same(RecordingSink):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = RecordingSink.__hash__

    one, two = Same(), Same()
    remove_one, remove_two = events.install(one), events.install(two)

    remove_one()

    assert events.installed()[0] is two
    remove_two()


def test_a_fanout_of_installed_sinks_keeps_them() -> None:
    """A session takes what is installed when it is entered; later changes are for later sessions."""
    sink = RecordingSink()
    remove = events.install(sink)
    fanout = Fanout(events.installed())
    remove()

    fanout.emit(EVENT)

    assert sink.events == [EVENT]


# -- the recording sink


class TestRecordingSink(EventSinkConformance):
    """The sink for tests is a sink."""

    def make_sink(self) -> EventSink:
        return RecordingSink()


class TestFanout(EventSinkConformance):
    """A fan-out is a sink too, also with a broken one in it."""

    def make_sink(self) -> EventSink:
        return Fanout([Broken(), RecordingSink()])


class TestCallableSink(EventSinkConformance):
    """A function is a sink."""

    def make_sink(self) -> EventSink:
        return CallableSink(lambda event: None)


def test_recording_sink_finds_events_by_type() -> None:
    """`of` picks a type, `names` lists all, `clear` forgets."""
    sink = RecordingSink()
    started = SaveStarted(checkpoint="c", step=1, reason="asked")
    sink.emit(EVENT)
    sink.emit(started)

    assert sink.of(SaveStarted) == [started]
    assert sink.names == ["Warned", "SaveStarted"]
    sink.clear()
    assert sink.events == []


def test_recording_sink_waits_for_an_event() -> None:
    """`wait_for` returns when another thread has emitted enough."""
    sink = RecordingSink()
    thread = threading.Thread(target=lambda: [sink.emit(EVENT) for _ in range(3)])
    thread.start()

    assert len(sink.wait_for(Warned, count=3)) == 3
    thread.join()


def test_recording_sink_says_what_came_instead() -> None:
    """A wait in vain shows the events that there were."""
    sink = RecordingSink()
    sink.emit(EVENT)

    with pytest.raises(TimeoutError, match=r"0 of 1 SaveStarted; there were \['Warned'\]"):
        sink.wait_for(SaveStarted, patience_s=0.01)


class TestAgainstBrokenSinks:
    """The conformance suite finds the faults that it is there for."""

    def test_a_sink_that_raises_fails(self) -> None:
        """Each test of the suite fails for a sink that raises."""

        class Suite(EventSinkConformance):
            def make_sink(self) -> EventSink:
                return Broken()

        suite = Suite()
        for name in [name for name in dir(suite) if name.startswith("test_")]:
            with pytest.raises((RuntimeError, AssertionError)):
                getattr(suite, name)()
