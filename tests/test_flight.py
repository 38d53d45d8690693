"""How far the save in flight is, whatever order its events come in."""

from __future__ import annotations

from spotsafe.events import CheckpointPublished, FileWritten, SaveAwaited, SaveStaged, SaveStarted
from spotsafe.flight import Flight
from spotsafe.testing.sinks import EventSinkConformance

ONE, TWO = "a000001-s000000001-0001-7f3a9c21", "a000001-s000000002-0002-7f3a9c21"


def started(name: str) -> SaveStarted:
    return SaveStarted(checkpoint=name, step=1, reason="interval")


def written(name: str, nbytes: int) -> FileWritten:
    return FileWritten(checkpoint=name, file="data", total_bytes=nbytes)


def staged(name: str, nbytes: int) -> SaveStaged:
    return SaveStaged(checkpoint=name, total_bytes=nbytes, blocked_s=0.1)


def published(name: str) -> CheckpointPublished:
    return CheckpointPublished(checkpoint=name, step=1, total_bytes=30, write_s=1.0, healthy=True)


def shown(flight: Flight) -> tuple[str, int, int | None, bool]:
    """What an event about it says."""
    event = flight.awaited(waited_s=4.0, limit_s=60.0, over=False)
    return event.checkpoint, event.written_bytes, event.total_bytes, event.published


class TestFlight(EventSinkConformance):
    """It is a sink like any other."""

    def make_sink(self) -> Flight:
        return Flight()


def test_files_are_counted_until_the_checkpoint_is_published() -> None:
    """How many bytes it will be is known when it is staged; the first file may be written before that."""
    flight, seen = Flight(), []
    for event in (started(ONE), written(ONE, 10), staged(ONE, 30), written(ONE, 20), published(ONE)):
        flight.emit(event)
        seen.append(shown(flight))
    assert seen == [
        (ONE, 0, None, False),
        (ONE, 10, None, False),
        (ONE, 10, 30, False),
        (ONE, 30, 30, False),
        (ONE, 30, 30, True),
    ]


def test_another_save_begins_at_zero() -> None:
    """What still comes of the one before does not count for it."""
    flight = Flight()
    for event in (
        started(ONE),
        staged(ONE, 30),
        written(ONE, 30),
        started(TWO),
        published(ONE),
        written(ONE, 30),
    ):
        flight.emit(event)
    assert shown(flight) == (TWO, 0, None, False)


def test_the_event_has_the_times_that_it_is_given() -> None:
    """And says whether the wait is over."""
    flight = Flight()
    flight.emit(started(ONE))
    assert flight.awaited(waited_s=4.0, limit_s=60.0, over=True) == SaveAwaited(
        checkpoint=ONE,
        waited_s=4.0,
        limit_s=60.0,
        written_bytes=0,
        total_bytes=None,
        published=False,
        over=True,
    )
