"""A stand-in for Azure's Scheduled Events and instance metadata, on 127.0.0.1, that a test or a person can script.

::

    with FakeAzureMetadata() as azure:
        process = subprocess.Popen([sys.executable, "train.py"], env={**os.environ, **azure.environ})
        azure.notice("Preempt", in_seconds=30)

It answers as Microsoft documents the real one ("Scheduled Events for Linux VMs", "Azure Instance Metadata Service for
virtual machines"), and fails on demand in the ways it has been seen to fail. An event that was scheduled starts by
itself when its time has come or when it is approved, as in life; it is over when the script says so.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from email.utils import formatdate
from functools import partial
from urllib.parse import parse_qsl, urlsplit

from spotsafe.clock import Clock
from spotsafe.testing.metadata import RESET, Answer, FakeMetadata, Faults, Request

EVENTS = "/metadata/scheduledevents"
INSTANCE = "/metadata/instance"
VERSIONS = "/metadata/versions"

EVENT_VERSIONS = ("2017-08-01", "2017-11-01", "2019-01-01", "2019-04-01", "2019-08-01", "2020-07-01")
INSTANCE_VERSIONS = ("2019-06-01", "2020-06-01", "2020-09-01", "2021-02-01", "2021-12-13", "2025-04-07")
MINIMUM_NOTICE_S: Mapping[str, float] = {
    "Freeze": 900.0,
    "Preempt": 30.0,
    "Reboot": 900.0,
    "Redeploy": 600.0,
    "Terminate": 300.0,
}
"""Seconds between the announcement and the event, by kind."""
MOST_PER_S = 5
"""Requests a second that the real service answers; for `Faults.most_per_s`."""

_SINCE = {
    "Preempt": "2017-11-01",
    "Terminate": "2019-01-01",
    "Description": "2019-04-01",
    "EventSource": "2019-08-01",
    "DurationInSeconds": "2020-07-01",
}
"""The version that brought a kind of event, or a member of one."""
_JSON = "application/json; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"


@dataclass(slots=True, kw_only=True)
class AzureFaults(Faults):
    """What goes wrong, until it is set otherwise. The defaults are a service in good health."""

    first_call_s: float = 0.0
    """Seconds, by the fake's clock, that the first request for events takes, and each other one until then; in life up
    to 120."""
    iso_dates: bool = False
    """``NotBefore`` as ISO 8601, as Microsoft's own mock server writes it."""
    stuck: bool = False
    """Events stay Scheduled when their time has come."""
    refuse_instance: int | None = None
    """Questions about the VM itself are answered with this status."""
    document: str | None = None
    """Said in place of the document of events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    id: str
    kind: str
    resources: tuple[str, ...]
    not_before: float
    started: bool
    description: str
    source: str
    duration_s: int


@dataclass(frozen=True, slots=True)
class _Change:
    """Something that happens to an event later on."""

    at: float
    event_id: str
    make: Callable[[], bool]
    """Makes it; whether there was anything to change."""


class FakeAzureMetadata(FakeMetadata):
    """The service of one VM. Use it as a context manager, or `start` and `stop` it.

    Attributes:
        faults: what goes wrong; set its members at any time.
        name: what Azure calls the VM.
        approved: the ids of the events that were approved, in order.
    """

    server = "IMDS/150.870.65.1854"
    actions = ("Preempt", "Terminate", "Reboot", "Redeploy", "Freeze")
    faults: AzureFaults

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        name: str = "trainer_6",
        host_name: str = "trainer000006",
        port: int = 0,
    ) -> None:
        """Nothing listens yet.

        Args:
            clock: for times in answers, for what becomes visible later and for events that start by themselves.
            name: what Azure calls the VM; the default is an instance of a scale set.
            host_name: what the VM calls itself.
            port: to listen on; 0 takes a free one.
        """
        super().__init__(clock=clock, port=port)
        self.faults = AzureFaults()
        self.name = name
        self._host_name = host_name
        self.approved: list[str] = []
        self._incarnation = 1
        self._events: dict[str, _Event] = {}
        self._changes: list[_Change] = []
        self._given_out: set[str] = set()
        self._enabled = False

    @property
    def environ(self) -> dict[str, str]:
        """The variable that makes spotsafe ask here. Azure's own libraries have none for this service."""
        return {"SPOTSAFE_AZURE_METADATA": self.url}

    # -- the script ---

    def notice(
        self, action: str = "Preempt", *, in_seconds: float = 30.0, after_seconds: float = 0.0
    ) -> None:
        """Schedule an event of this VM; `schedule` can do more.

        Args:
            action: one of `actions`.
            in_seconds: from now until it may start.
            after_seconds: from now until it can be seen.
        """
        self.schedule(action, in_seconds=in_seconds, after_seconds=after_seconds)

    def schedule(
        self,
        kind: str = "Preempt",
        *,
        in_seconds: float | None = None,
        resources: Sequence[str] | None = None,
        source: str = "Platform",
        description: str = "",
        duration_s: int = -1,
        started: bool = False,
        after_seconds: float = 0.0,
    ) -> str:
        """Schedule an event.

        Args:
            kind: one of `actions`, or one that is not known yet.
            in_seconds: from now until it may start; None is the documented minimum, behind `after_seconds`.
            resources: the VMs that it concerns; None is this one.
            source: ``Platform`` or ``User``.
            description: for people.
            duration_s: seconds of the interruption; -1 is unknown.
            started: it is never Scheduled, as with a failure of the hardware.
            after_seconds: from now until it can be seen.

        Returns:
            Its id.
        """
        if in_seconds is None:
            in_seconds = after_seconds + MINIMUM_NOTICE_S.get(kind, 900.0)
        event = _Event(
            id=str(uuid.uuid4()).upper(),
            kind=kind,
            resources=(self.name,) if resources is None else tuple(resources),
            not_before=self.clock.wall() + in_seconds,
            started=started,
            description=description,
            source=source,
            duration_s=duration_s,
        )
        with self.lock:
            self._given_out.add(event.id)
            self._later(after_seconds, event.id, partial(self._add, event))
            self._later(
                max(in_seconds, after_seconds), event.id, partial(self._begin, event.id, by_time=True)
            )
        return event.id

    def start_event(self, event_id: str, *, after_seconds: float = 0.0) -> None:
        """Let an event start, before its time or after it."""
        with self.lock:
            self._later(after_seconds, event_id, partial(self._begin, event_id))

    def finish(self, event_id: str) -> None:
        """An event is over: it is gone."""
        self._remove(event_id)

    def cancel(self, event_id: str | None = None) -> None:
        """An event, or every one, will not happen: it is gone, and that is all that can be seen."""
        with self.lock:
            self._settle()
            ids = [*self._given_out] if event_id is None else [event_id]
        for each in ids:
            self._remove(each)

    # -- answering ---

    def take(self, request: Request) -> Answer | None:
        """What is said to a request, faults included; the first one for events waits as long as it takes."""
        if request.place == EVENTS and not self._enabled and self.faults.first_call_s > 0:
            self.clock.wait(self.closing, self.faults.first_call_s)
            if self.closing.is_set():
                return RESET
        answer = super().take(request)
        if answer is None or answer is RESET:
            return answer
        return replace(answer, headers={**answer.headers, "x-ms-request-id": str(uuid.uuid4())})

    def answer(self, request: Request) -> Answer | None:
        """What the service in good health says."""
        refusal = _refusal(request)
        if refusal is not None:
            return refusal
        if request.place == EVENTS:
            return self._answer_events(request)
        if request.method != "GET":
            return _error(405, "Method not allowed")
        if request.place == VERSIONS:
            return _json({"apiVersions": sorted({*EVENT_VERSIONS, *INSTANCE_VERSIONS})})
        if request.place == INSTANCE or request.place.startswith(INSTANCE + "/"):
            return self._answer_instance(request)
        return _error(404, "Not found")

    def _answer_events(self, request: Request) -> Answer:
        if request.method not in {"GET", "POST"}:
            return _error(405, "Method not allowed")
        version = request.asks("api-version")
        if version not in EVENT_VERSIONS:
            return _wrong_version(EVENT_VERSIONS)
        self._enabled = True
        self._settle()
        if request.method == "POST":
            return self._approve(request.body)
        if self.faults.document is not None:
            return Answer(200, self.faults.document, content_type=_JSON)
        shown = [each for each in self._events.values() if version >= _SINCE.get(each.kind, "")]
        events = [self._described(each, version) for each in shown]
        return _json({"DocumentIncarnation": self._incarnation, "Events": events})

    def _approve(self, body: bytes) -> Answer:
        """Start what is asked for. An event that has started, or is over, may be approved all the same."""
        try:
            ids = [each["EventId"] for each in json.loads(body)["StartRequests"]]
        except (ValueError, LookupError, TypeError):
            return _error(400, "Bad request. The body is malformed")
        if not ids or not all(isinstance(each, str) and each in self._given_out for each in ids):
            return _error(400, "Bad request. There is no such event")
        for each in ids:
            self.approved.append(each)
            self._incarnation += self._begin(each)
        return Answer(200, content_type=_JSON)

    def _answer_instance(self, request: Request) -> Answer:
        if request.asks("api-version") not in INSTANCE_VERSIONS:
            return _wrong_version(INSTANCE_VERSIONS)
        if self.faults.refuse_instance is not None:
            return Answer(self.faults.refuse_instance)
        found: object = self._instance()
        for part in request.place.removeprefix(INSTANCE).strip("/").split("/"):
            if isinstance(found, list) and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict) and part in found:
                found = found[part]
            elif part:
                return _error(404, "Not found")
        wanted = request.asks("format") or "json"
        if wanted not in {"json", "text"} or (wanted == "json" and isinstance(found, str)):
            return _error(400, "Bad request. A leaf has the format text only")
        return _json(found) if wanted == "json" else Answer(200, _text(found), content_type=_TEXT)

    def _instance(self) -> dict[str, object]:
        return {
            "compute": {
                "azEnvironment": "AzurePublicCloud",
                "evictionPolicy": "Deallocate",
                "location": "westeurope",
                "name": self.name,
                "osProfile": {"adminUsername": "trainer", "computerName": self._host_name},
                "osType": "Linux",
                "platformFaultDomain": "0",
                "platformUpdateDomain": "0",
                "priority": "Spot",
                "provider": "Microsoft.Compute",
                "resourceGroupName": "training",
                "vmId": "5d4fd0a4-2f0c-4e5c-9b1f-0f5f8d2a7c61",
                "vmScaleSetName": self.name.rpartition("_")[0],
                "vmSize": "Standard_NC24ads_A100_v4",
                "zone": "1",
            },
            "network": {
                "interface": [
                    {
                        "ipv4": {
                            "ipAddress": [{"privateIpAddress": "10.0.0.4", "publicIpAddress": ""}],
                            "subnet": [{"address": "10.0.0.0", "prefix": "24"}],
                        },
                        "ipv6": {"ipAddress": []},
                        "macAddress": "0022480A0B0C",
                    }
                ]
            },
        }

    def _described(self, event: _Event, version: str) -> dict[str, object]:
        said = {
            "EventId": event.id,
            "EventStatus": "Started" if event.started else "Scheduled",
            "EventType": event.kind,
            "ResourceType": "VirtualMachine",
            "Resources": list(event.resources),
            "NotBefore": "" if event.started else self._date(event.not_before),
            "Description": event.description,
            "EventSource": event.source,
            "DurationInSeconds": event.duration_s,
        }
        return {name: value for name, value in said.items() if version >= _SINCE.get(name, "")}

    def _date(self, at: float) -> str:
        if self.faults.iso_dates:
            return datetime.fromtimestamp(at, tz=timezone.utc).isoformat().replace("+00:00", "Z")
        return formatdate(at, usegmt=True)

    # -- what happens to events; with `lock` held ---

    def _later(self, after_s: float, event_id: str, make: Callable[[], bool]) -> None:
        self._changes.append(_Change(self.clock.monotonic() + after_s, event_id, make))

    def _settle(self) -> None:
        """Make the changes whose time has come. Each that can be seen is a new incarnation."""
        now = self.clock.monotonic()
        due = sorted((each for each in self._changes if each.at <= now), key=lambda each: each.at)
        self._changes = [each for each in self._changes if each.at > now]
        for each in due:
            self._incarnation += each.make()

    def _add(self, event: _Event) -> bool:
        self._events[event.id] = event
        return True

    def _begin(self, event_id: str, *, by_time: bool = False) -> bool:
        event = self._events.get(event_id)
        if event is None or event.started or (by_time and self.faults.stuck):
            return False
        self._events[event_id] = replace(event, started=True)
        return True

    def _remove(self, event_id: str) -> None:
        with self.lock:
            self._settle()
            self._changes = [each for each in self._changes if each.event_id != event_id]
            self._incarnation += self._events.pop(event_id, None) is not None


def _refusal(request: Request) -> Answer | None:
    """What is said to a request that may have been redirected, or is malformed."""
    if request.headers.get("metadata", "").lower() != "true":
        return _error(400, "Bad request. Required metadata header not specified")
    names = [name for name, _ in parse_qsl(urlsplit(request.path).query, keep_blank_values=True)]
    if "x-forwarded-for" in request.headers or len(set(names)) < len(names):
        return _error(400, "Bad request")
    return None


def _json(value: object) -> Answer:
    return Answer(200, json.dumps(value, separators=(",", ":")), content_type=_JSON)


def _error(status: int, text: str, **more: object) -> Answer:
    return replace(_json({"error": text, **more}), status=status)


def _wrong_version(versions: Sequence[str]) -> Answer:
    newest = sorted(versions, reverse=True)[:3]
    text = "Bad request. api-version is invalid or was not specified in the request"
    return _error(400, text, **{"newest-versions": newest})


def _text(found: object) -> str:
    """A leaf as it is; of anything else the names in it, folders with a slash."""
    if isinstance(found, dict):
        return "\n".join(name if isinstance(value, str) else f"{name}/" for name, value in found.items())
    if isinstance(found, list):
        return "\n".join(f"{place}/" for place in range(len(found)))
    return str(found)
