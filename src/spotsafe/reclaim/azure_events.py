"""What Azure's Scheduled Events say about one VM: pure values and one decision. `reclaim.azure` asks for them.

What each kind of event is taken for:

- ``Preempt`` and ``Terminate`` delete the VM: a RECLAIM as soon as they are seen.
- ``Reboot`` and ``Redeploy`` are announced ten minutes ahead, and a week for hardware that will fail. To stop training
  then would waste all that time, so they are a RISK, and a RECLAIM when they are near or Started. One that is Started
  when the watching begins stays a RISK: it stays listed for minutes behind the restart, so most likely it is what has
  just brought this machine up, and to leave for it would be to leave again at every start.
- ``Freeze`` pauses the VM for seconds; memory, files and, mostly, connections survive. It stops nothing, and is a RISK
  because somebody works at the host: that costs one save. With a duration of 0 it is not even that.
- Kinds that are not known yet are a RISK.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from spotsafe.reclaim.notice import NoticeKind, ReclaimNotice, deadline_after

LONGEST_NOTICE_S: Mapping[str, float] = {
    "Preempt": 30.0,
    "Redeploy": 600.0,
    "Reboot": 900.0,
    "Terminate": 900.0,
}
"""Seconds of notice that a deadline relies on at most. The documentation calls them the minimum; but events have been
announced later than that, and hardly any Preempt sooner."""
FARTHEST_S = 7 * 86400.0
"""Seconds ahead at most of what is announced for hardware that will fail."""
STALE_AFTER_S = 600.0
"""An event that should have started longer ago than this, when first seen, and has not, was not carried out."""

_DELETES = frozenset({"Preempt", "Terminate"})
_RESTARTS = frozenset({"Reboot", "Redeploy"})
_STATUSES = ("Scheduled", "Started")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledEvent:
    """One event, as the service says it."""

    id: str
    kind: str
    """``EventType``."""
    resources: tuple[str, ...]
    """The names of the VMs that it concerns."""
    started: bool
    not_before: str
    """When it starts at the earliest; blank once it has."""
    duration_s: int | None
    """Seconds that it interrupts the VM; -1 or None: unknown."""

    def concerns(self, vm: str) -> bool:
        """Whether it concerns the VM of that name. Azure's names have no case."""
        return vm.casefold() in (each.casefold() for each in self.resources)

    def may_be_approved_by(self, vm: str) -> bool:
        """Whether it waits to delete this VM and no other: an approval counts for all that it concerns."""
        return self.kind in _DELETES and not self.started and len(self.resources) == 1 and self.concerns(vm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One answer of the service."""

    incarnation: int
    events: tuple[ScheduledEvent, ...]
    unreadable: int
    """Events besides these that make no sense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """An event and when it was seen. All times are seconds of `Clock.monotonic`."""

    event: ScheduledEvent
    since: float
    """When it was first seen, whatever it said then."""
    at: float
    """When it was first seen to say what it says now."""
    left_s: float | None
    """Seconds from `at` until it may start, by the service's clock; None: it does not say."""
    at_first_look: bool
    """Whether it was there when the watching began."""

    def is_of(self, event: ScheduledEvent, *, same_document: bool) -> bool:
        """Whether the event still says what it said; in a document of the same incarnation its time has not moved."""
        says_so = same_document or event.not_before == self.event.not_before
        return says_so and event.started == self.event.started

    @property
    def is_stale(self) -> bool:
        """Whether its time had long passed when it was seen."""
        return not self.event.started and self.left_s is not None and self.left_s < -STALE_AFTER_S


def read_document(text: str) -> Document:
    """The service's JSON as values.

    Raises:
        ValueError: it is not such a document.
    """
    try:
        said = json.loads(text)
        incarnation, events = said["DocumentIncarnation"], said["Events"]
    except (LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"it lacks DocumentIncarnation or Events ({type(error).__name__})") from error
    if type(incarnation) is not int or type(events) is not list:
        raise ValueError("DocumentIncarnation is not a number, or Events not a list")
    found = [_read_event(each) for each in events]
    readable = tuple(each for each in found if each is not None)
    return Document(incarnation=incarnation, events=readable, unreadable=len(found) - len(readable))


def verdict(seen: Sighting, *, now: float, near_s: float, source: str) -> ReclaimNotice | None:
    """What an event of this VM means.

    Args:
        seen: the event.
        now: seconds of `Clock.monotonic`.
        near_s: seconds before a restart from which on it is certain.
        source: for the notice.
    """
    event = seen.event
    if event.kind == "Freeze" and event.duration_s == 0:
        return None
    certain_from = _certain_from(seen, near_s=near_s)
    if certain_from is None or now < certain_from:
        return ReclaimNotice(
            source=source,
            kind=NoticeKind.RISK,
            action=event.kind,
            deadline=_restart_at(seen),
            received=seen.since,
        )
    return ReclaimNotice(
        source=source,
        kind=NoticeKind.RECLAIM,
        action=event.kind,
        deadline=_ends_at(seen, certain_from),
        received=certain_from,
    )


def _certain_from(seen: Sighting, *, near_s: float) -> float | None:
    """From when on it is a RECLAIM; None: it never is."""
    event = seen.event
    if seen.is_stale:
        return None
    if event.kind in _DELETES:
        return seen.at
    if event.kind not in _RESTARTS:
        return None
    if event.started:
        return None if seen.at_first_look else seen.at
    return None if seen.left_s is None else max(seen.at, seen.at + seen.left_s - near_s)


def _ends_at(seen: Sighting, certain_from: float) -> float | None:
    if seen.event.started:
        return certain_from
    if seen.left_s is None:
        return None
    left_s = seen.at + seen.left_s - certain_from
    return deadline_after(left_s, now=certain_from, at_most=LONGEST_NOTICE_S[seen.event.kind])


def _restart_at(seen: Sighting) -> float | None:
    if seen.event.kind not in _RESTARTS or seen.event.started or seen.left_s is None or seen.is_stale:
        return None
    return deadline_after(seen.left_s, now=seen.at, at_most=FARTHEST_S)


def _read_event(said: object) -> ScheduledEvent | None:
    """One member of ``Events``; None if it makes no sense."""
    if not isinstance(said, dict):
        return None
    name, kind, status = said.get("EventId"), said.get("EventType"), said.get("EventStatus")
    resources, duration_s = said.get("Resources"), said.get("DurationInSeconds")
    if not (isinstance(name, str) and name and isinstance(kind, str) and kind and status in _STATUSES):
        return None
    if not isinstance(resources, list) or not all(isinstance(each, str) for each in resources):
        return None
    not_before = said.get("NotBefore")
    return ScheduledEvent(
        id=name,
        kind=kind,
        resources=tuple(resources),
        started=status == "Started",
        not_before=not_before if isinstance(not_before, str) else "",
        duration_s=duration_s if isinstance(duration_s, int) else None,
    )
