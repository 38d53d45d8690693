"""The fake answers as Google documents its server, and as Google's own client expects it; it fails on demand."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from spotsafe.testing.clock import ManualClock
from spotsafe.testing.gcp import MAINTENANCE, PREEMPTED, ROOT, FakeGcpMetadata
from tests.testing import asking

GOOGLE = {"Metadata-Flavor": "Google"}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(wall=1_700_000_000.0)


@pytest.fixture
def gcp(clock: ManualClock) -> Iterator[FakeGcpMetadata]:
    with FakeGcpMetadata(clock=clock) as fake:
        yield fake


def ask(
    fake: FakeGcpMetadata, path: str, *, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, str, dict[str, str]]:
    return asking.ask(fake, method, path, GOOGLE if headers is None else headers)


def test_a_value(gcp: FakeGcpMetadata) -> None:
    """Plain text without a line end, with an ETag and the server's flavor."""
    status, body, headers = ask(gcp, ROOT + PREEMPTED)
    assert (status, body) == (200, "FALSE")
    assert headers["metadata-flavor"] == "Google"
    assert headers["server"].strip() == "Metadata Server for VM"
    assert headers["content-type"] == "application/text"
    assert len(headers["etag"]) == 16
    assert ask(gcp, ROOT + PREEMPTED + "?alt=json")[1] == '"FALSE"'


@pytest.mark.parametrize(
    "headers", [{}, {"Metadata-Flavor": "google"}, {**GOOGLE, "X-Forwarded-For": "10.0.0.1"}]
)
def test_requests_that_are_refused(headers: dict[str, str], gcp: FakeGcpMetadata) -> None:
    """Without the header, and through a proxy."""
    assert ask(gcp, ROOT + PREEMPTED, headers=headers)[0] == 403


def test_what_is_not_there(gcp: FakeGcpMetadata) -> None:
    """404, which is Google's too."""
    status, _, headers = ask(gcp, ROOT + "instance/nothing")
    assert status == 404
    assert headers["metadata-flavor"] == "Google"
    gcp.set_key(PREEMPTED, None)
    assert ask(gcp, ROOT + PREEMPTED)[0] == 404
    assert ask(gcp, ROOT + PREEMPTED, method="POST")[0] == 405


def test_a_change_has_another_etag(gcp: FakeGcpMetadata) -> None:
    """And so has the way back."""
    etags = [ask(gcp, ROOT + PREEMPTED)[2]["etag"]]
    gcp.preempt()
    etags.append(ask(gcp, ROOT + PREEMPTED)[2]["etag"])
    gcp.cancel()
    etags.append(ask(gcp, ROOT + PREEMPTED)[2]["etag"])
    assert len(set(etags)) == 3


def test_a_change_that_comes_later(gcp: FakeGcpMetadata, clock: ManualClock) -> None:
    """By the clock that it was given."""
    gcp.preempt(after_seconds=60)
    gcp.notice("MIGRATE_ON_HOST_MAINTENANCE", after_seconds=30)
    assert ask(gcp, ROOT + PREEMPTED)[1] == "FALSE"
    clock.advance(60)
    assert ask(gcp, ROOT + PREEMPTED)[1] == "TRUE"
    assert ask(gcp, ROOT + MAINTENANCE)[1] == "MIGRATE_ON_HOST_MAINTENANCE"


def test_a_get_hangs_until_the_change(gcp: FakeGcpMetadata) -> None:
    """With the ETag of now and without any."""
    etag = ask(gcp, ROOT + PREEMPTED)[2]["etag"]
    found: list[str] = []
    paths = [f"{ROOT}{PREEMPTED}?wait_for_change=true{more}" for more in ("", f"&last_etag={etag}")]
    threads = [threading.Thread(target=lambda path=path: found.append(ask(gcp, path)[1])) for path in paths]
    for thread in threads:
        thread.start()
    gcp.wait_until_hanging(2)
    gcp.preempt()
    for thread in threads:
        thread.join(30)
    assert found == ["TRUE", "TRUE"]
    assert gcp.hanging == 0


def test_a_get_with_an_old_etag_does_not_hang(gcp: FakeGcpMetadata) -> None:
    """So no change is lost between two."""
    assert ask(gcp, f"{ROOT}{PREEMPTED}?wait_for_change=true&last_etag=NONE")[1] == "FALSE"


def test_a_get_hangs_no_longer_than_asked_for(gcp: FakeGcpMetadata) -> None:
    """Then it says what it said before."""
    etag = ask(gcp, ROOT + PREEMPTED)[2]["etag"]
    path = f"{ROOT}{PREEMPTED}?wait_for_change=true&last_etag={etag}&timeout_sec="
    assert ask(gcp, path + "0")[:2] == (200, "FALSE")
    assert ask(gcp, path + "soon")[0] == 400


def test_a_hanging_get_ends_with_the_fake(gcp: FakeGcpMetadata) -> None:
    """Nobody waits for ever."""
    ended = threading.Event()

    def hang() -> None:
        try:
            ask(gcp, f"{ROOT}{PREEMPTED}?wait_for_change=true")
        except (OSError, http.client.HTTPException):
            ended.set()

    thread = threading.Thread(target=hang)
    thread.start()
    gcp.wait_until_hanging()
    gcp.stop()
    thread.join(30)
    assert ended.is_set()


def test_folders(gcp: FakeGcpMetadata) -> None:
    """A list of names; all of it as JSON where that is asked for."""
    assert "preempted\n" in ask(gcp, ROOT + "instance/")[1]
    assert "scheduling/\n" in ask(gcp, ROOT + "instance/")[1]
    status, body, headers = ask(gcp, ROOT + "instance/?recursive=true")
    assert status == 200
    assert headers["content-type"] == "application/json"
    said = json.loads(body)
    assert said["maintenanceEvent"] == "NONE"
    assert said["serviceAccounts"]["default"]["aliases"] == ["default"]


def test_gke_shows_little(gcp: FakeGcpMetadata) -> None:
    """Of what the issue of exporters that looked for it lists."""
    gcp.faults.conceals = True
    assert ask(gcp, ROOT + PREEMPTED)[0] == 404
    assert ask(gcp, ROOT + MAINTENANCE)[0] == 404
    assert ask(gcp, ROOT + "instance/zone")[0] == 200
    assert "preempted" not in ask(gcp, ROOT + "instance/")[1]


def test_too_many_requests(gcp: FakeGcpMetadata, clock: ManualClock) -> None:
    """Within a second; then it answers again."""
    gcp.faults.most_per_s = 2
    assert [ask(gcp, ROOT + PREEMPTED)[0] for _ in range(3)] == [200, 200, 429]
    clock.advance(1)
    assert ask(gcp, ROOT + PREEMPTED)[0] == 200


CLIENT = """
import json
from google.auth import _helpers
from google.auth.compute_engine import _metadata
from google.auth.transport.requests import Request
request = Request()
found = {
    "ping": _metadata.ping(request),
    "preempted": _metadata.get(request, "instance/preempted"),
    "project": _metadata.get_project_id(request),
    "account": _metadata.get_service_account_info(request)["email"],
}
print(json.dumps(found))
"""


def test_googles_own_client(gcp: FakeGcpMetadata) -> None:
    """`google-auth` finds the server by its variables, and reads it. It looks at them when it is imported."""
    pytest.importorskip("google.auth", reason="comes with gcsfs")
    gcp.preempt()
    environ = {**os.environ, **gcp.environ, "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CLIENT],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == {
        "ping": True,
        "preempted": "TRUE",
        "project": "spotsafe-fake",
        "account": "trainer@spotsafe-fake.iam.gserviceaccount.com",
    }
