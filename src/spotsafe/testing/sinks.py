"""A sink that remembers, and what every sink has to do."""

from __future__ import annotations

import threading
import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from spotsafe import events
from spotsafe.events import Event, EventSink

E = TypeVar("E", bound=Event)


class RecordingSink:
    """Keeps every event, in order. Safe to use from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Keep the event."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    @property
    def events(self) -> list[Event]:
        """All events so far."""
        with self._changed:
            return list(self._events)

    @property
    def names(self) -> list[str]:
        """The names of the types of all events so far."""
        return [type(event).__name__ for event in self.events]

    def of(self, kind: type[E]) -> list[E]:
        """The events of one type so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def wait_for(self, kind: type[E], *, count: int = 1, patience_s: float = 30.0) -> list[E]:
        """Block until there are `count` events of a type, and return them.

        Raises:
            TimeoutError: they did not come within `patience_s` seconds of real time.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._of(kind)) >= count, patience_s)
        found = self.of(kind)
        if len(found) < count:
            raise TimeoutError(f"{len(found)} of {count} {kind.__name__}; there were {self.names}")
        return found

    def clear(self) -> None:
        """Forget all events."""
        with self._changed:
            self._events.clear()

    def _of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self._events if isinstance(event, kind)]


def event_types() -> list[type[Event]]:
    """Every type of event that spotsafe emits, sorted by name."""
    found = (one for one in vars(events).values() if isinstance(one, type) and issubclass(one, Event))
    return sorted((one for one in found if one is not Event), key=lambda one: one.__name__)


def sample_events() -> list[Event]:
    """One event of every type, with a value in every field and once with None where that is allowed."""
    return [
        event for kind in event_types() for event in (_sample(kind, none=False), _sample(kind, none=True))
    ]


_SAMPLES: dict[object, object] = {
    str: "a text",
    int: 3,
    float: 1.5,
    bool: True,
    tuple[str, ...]: ("one", "two"),
    tuple[tuple[str, float], ...]: (("one", 1.5), ("two", 0.0)),
}


def _sample(kind: type[Event], *, none: bool) -> Event:
    values = {name: _value(hint, none=none) for name, hint in typing.get_type_hints(kind).items()}
    return kind(**values)


def _value(hint: Any, *, none: bool) -> object:
    if isinstance(hint, types.UnionType):
        options: Sequence[object] = typing.get_args(hint)
        return None if none else _SAMPLES[options[0]]
    return _SAMPLES[hint]


class EventSinkConformance:
    """What every `EventSink` does. Derive a test class from it and give it a sink."""

    def make_sink(self) -> EventSink:
        """The sink to be tested."""
        raise NotImplementedError

    def test_takes_every_event(self) -> None:
        """No event of spotsafe makes it raise, whether optional fields are filled or not."""
        sink = self.make_sink()
        for event in sample_events():
            sink.emit(event)

    def test_takes_events_of_later_versions(self) -> None:
        """A type that it does not know is no error."""

        class Unheard(Event):
            """An event of the future."""

        self.make_sink().emit(Unheard())

    def test_takes_any_text(self) -> None:
        """Line breaks, other scripts and bytes that are no UTF-8 are no error."""
        sink = self.make_sink()
        for text in ("two\nlines", "\u6f22\u5b57", "\udce9 from a file name", "", "x" * 100_000):
            sink.emit(events.Warned(message=text))

    def test_takes_events_from_many_threads(self) -> None:
        """Several threads at once neither raise nor block each other for good."""
        sink, failures = self.make_sink(), list[BaseException]()

        def emit() -> None:
            try:
                for event in sample_events():
                    sink.emit(event)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the test shows it
                failures.append(error)

        threads = [threading.Thread(target=emit) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert failures == []
