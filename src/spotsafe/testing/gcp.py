"""A stand-in for the metadata server of Compute Engine, on 127.0.0.1, that a test or a person can script.

::

    with FakeGcpMetadata() as gcp:
        process = subprocess.Popen([sys.executable, "train.py"], env={**os.environ, **gcp.environ})
        gcp.preempt()

It answers as Google documents the real one ("About VM metadata", "View and query VM metadata"), hanging GETs included,
and as the `google-auth` package expects it; and it fails on demand in the ways it has been seen to fail.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from spotsafe.clock import Clock
from spotsafe.testing.metadata import RESET, Answer, FakeMetadata, Faults, Request

ROOT = "/computeMetadata/v1/"
FLAVOR = "Metadata-Flavor"
PREEMPTED = "instance/preempted"
MAINTENANCE = "instance/maintenance-event"

_SHOWN_BY_GKE = ("instance/attributes/", "instance/hostname", "instance/id", "instance/service-accounts/")
_SLICE_S = 0.02
_TEXT = "application/text"
_JSON = "application/json"


@dataclass(slots=True, kw_only=True)
class GcpFaults(Faults):
    """What goes wrong, until it is set otherwise. The defaults are a service in good health."""

    conceals: bool = False
    """As the metadata server of GKE's Workload Identity: of an instance it shows little, and no ``preempted``."""
    flavor: str | None = "Google"
    """What answers carry; None is somebody else's server, such as the portal of a network."""
    answers_at_once: bool = False
    """Hanging GETs do not hang."""


@dataclass(frozen=True, slots=True)
class _Change:
    body: str
    visible_from: float


class FakeGcpMetadata(FakeMetadata):
    """The server of one VM. Use it as a context manager, or `start` and `stop` it.

    Attributes:
        faults: what goes wrong; set its members at any time.
        hanging: how many requests hang now.
    """

    server = "Metadata Server for VM"
    actions = ("preempted", "TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE")
    faults: GcpFaults

    def __init__(self, *, clock: Clock | None = None, port: int = 0) -> None:
        """Nothing listens yet.

        Args:
            clock: for what becomes visible later. How long a GET hangs is real time.
            port: to listen on; 0 takes a free one.
        """
        super().__init__(clock=clock, port=port)
        self.faults = GcpFaults()
        self.hanging = 0
        self._breaks = (0, 0)
        start = float("-inf")
        account = "instance/service-accounts/default/"
        self._keys = {
            key: [_Change(body, start)]
            for key, body in {
                PREEMPTED: "FALSE",
                MAINTENANCE: "NONE",
                "instance/id": "4520031799277581759",
                "instance/name": "trainer",
                "instance/hostname": "trainer.c.spotsafe-fake.internal",
                "instance/zone": "projects/1/zones/us-central1-a",
                "instance/scheduling/automatic-restart": "FALSE",
                "instance/scheduling/on-host-maintenance": "TERMINATE",
                "instance/scheduling/preemptible": "TRUE",
                "instance/scheduling/provisioning-model": "SPOT",
                account + "aliases": "default\n",
                account + "email": "trainer@spotsafe-fake.iam.gserviceaccount.com",
                account + "scopes": "https://www.googleapis.com/auth/cloud-platform\n",
                "project/numeric-project-id": "1",
                "project/project-id": "spotsafe-fake",
            }.items()
        }

    @property
    def environ(self) -> dict[str, str]:
        """The variables that make spotsafe, and Google's own libraries, ask here."""
        host = self.url.removeprefix("http://")
        return {"GCE_METADATA_HOST": host, "GCE_METADATA_IP": host}

    # -- the script ---

    def notice(self, action: str, *, in_seconds: float = 30.0, after_seconds: float = 0.0) -> None:  # noqa: ARG002 - see below
        """Announce a preemption, or maintenance of the host.

        Args:
            action: one of `actions`.
            in_seconds: nothing of it shows: Google's server speaks of no time.
            after_seconds: from now until it can be seen.
        """
        if action == "preempted":
            self.preempt(after_seconds=after_seconds)
        else:
            self.set_key(MAINTENANCE, action, after_seconds=after_seconds)

    def preempt(self, *, after_seconds: float = 0.0) -> None:
        """The VM is being preempted. In life that is for good."""
        self.set_key(PREEMPTED, "TRUE", after_seconds=after_seconds)

    def cancel(self) -> None:
        """Neither a preemption nor maintenance: another VM, or maintenance that is over."""
        self.set_key(PREEMPTED, "FALSE")
        self.set_key(MAINTENANCE, "NONE")

    def set_key(self, key: str, body: str | None, *, after_seconds: float = 0.0) -> None:
        """Set any key below ``/computeMetadata/v1/``; None removes it, so that it answers 404."""
        with self.lock:
            if body is None:
                self._keys.pop(key, None)
            elif self._keys.get(key, [_Change("", 0.0)])[-1].body != body:
                change = _Change(body, self.clock.monotonic() + after_seconds)
                self._keys.setdefault(key, []).append(change)
            self.lock.notify_all()

    def break_hanging(self, status: int = 0) -> None:
        """End all requests that hang now with a status, like 503; by 0, with a reset of the connection."""
        with self.lock:
            self._breaks = (self._breaks[0] + 1, status)
            self.lock.notify_all()

    def wait_until_hanging(self, count: int = 1, *, patience_s: float = 30.0) -> None:
        """Block until so many requests hang.

        Raises:
            TimeoutError: they did not come within `patience_s` seconds.
        """
        with self.lock:
            if not self.lock.wait_for(lambda: self.hanging >= count, patience_s):
                raise TimeoutError(f"{self.hanging} of {count} requests hang")

    # -- answering ---

    def take(self, request: Request) -> Answer | None:
        """What is said to a request, faults included; every answer says whose it is."""
        answer = super().take(request)
        if answer is None or answer is RESET or self.faults.flavor is None:
            return answer
        return replace(answer, headers={**answer.headers, FLAVOR: self.faults.flavor})

    def answer(self, request: Request) -> Answer | None:
        """What the service in good health says."""
        if request.method not in {"GET", "HEAD"}:
            return Answer(405)
        if request.place == "/":
            return Answer(200, "computeMetadata/\n", content_type=_TEXT)
        if request.headers.get(FLAVOR.lower()) != "Google" or "x-forwarded-for" in request.headers:
            return Answer(403, f"Missing {FLAVOR}:Google header.\n", content_type="text/html; charset=UTF-8")
        key = request.place.removeprefix(ROOT)
        if not request.place.startswith(ROOT) or self._hides(key):
            return Answer(404)
        if key.endswith("/") or not key:
            return self._folder(key, recursive=request.asks("recursive") == "true")
        return self._leaf(key, request)

    def _leaf(self, key: str, request: Request) -> Answer:
        limit = request.asks("timeout_sec")
        if limit is not None and not re.fullmatch("[0-9]{1,6}", limit):
            return Answer(400)
        found = self._now(key)
        if found is not None and request.asks("wait_for_change") == "true":
            known = request.asks("last_etag")
            if known is None or known == found[1]:
                broken = self._hang(key, found[1], None if limit is None else float(limit))
                if broken is not None:
                    return broken
                found = self._now(key)
        if found is None:
            return Answer(404)
        body, etag = found
        if request.asks("alt") == "json":
            return Answer(200, json.dumps(body), {"ETag": etag}, content_type=_JSON)
        return Answer(200, body, {"ETag": etag}, content_type=_TEXT)

    def _hang(self, key: str, etag: str, limit_s: float | None) -> Answer | None:
        """Wait for a change, or the time that was asked for; what is said if that ends otherwise."""
        end = None if limit_s is None else time.monotonic() + limit_s
        breaks = self._breaks[0]
        if self.faults.answers_at_once:
            return None
        self.hanging += 1
        self.lock.notify_all()
        try:
            while not self.closing.is_set() and (end is None or time.monotonic() < end):
                if self._breaks[0] != breaks:
                    return Answer(self._breaks[1]) if self._breaks[1] else RESET
                now = self._now(key)
                if now is None or now[1] != etag:
                    return None
                self.lock.wait(_SLICE_S)
        finally:
            self.hanging -= 1
        return RESET if self.closing.is_set() else None

    def _now(self, key: str) -> tuple[str, str] | None:
        """Body and ETag of a key, as far as its changes can be seen; None if it is not there."""
        now = self.clock.monotonic()
        seen = [change for change in self._keys.get(key, ()) if change.visible_from <= now]
        if not seen:
            return None
        return seen[-1].body, hashlib.sha256(f"{key} {len(seen)}".encode()).hexdigest()[:16]

    def _hides(self, key: str) -> bool:
        return self.faults.conceals and not (
            key.startswith((*_SHOWN_BY_GKE, "project/")) or key in {"", "instance/", "instance/zone"}
        )

    def _folder(self, folder: str, *, recursive: bool) -> Answer:
        below = {
            key.removeprefix(folder): found[0]
            for key in self._keys
            if key.startswith(folder) and not self._hides(key) and (found := self._now(key)) is not None
        }
        if not below:
            return Answer(404)
        etag = hashlib.sha256(json.dumps(below, sort_keys=True).encode()).hexdigest()[:16]
        if recursive:
            return Answer(200, json.dumps(_tree(below)), {"ETag": etag}, content_type=_JSON)
        names = sorted({name.partition("/")[0] + ("/" if "/" in name else "") for name in below})
        return Answer(200, "".join(f"{name}\n" for name in names), {"ETag": etag}, content_type=_TEXT)


def _tree(below: Mapping[str, str]) -> dict[str, object]:
    """As the server makes it: names in camel case, and values of several lines as lists."""
    found: dict[str, object] = {}
    for key, body in below.items():
        *folders, leaf = [
            re.sub("-([a-z])", lambda hit: hit.group(1).upper(), part) for part in key.split("/")
        ]
        inner = found
        for folder in folders:
            inner = inner.setdefault(folder, {})  # type: ignore[assignment] # a folder is never a leaf
        inner[leaf] = body.split("\n")[:-1] if body.endswith("\n") else body
    return found
