"""The fake answers as the documentation says the real service does, and fails only on demand."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime

import pytest

from spotsafe.testing.aws import (
    INSTANCE_ACTION,
    LIFE_CYCLE,
    REBALANCE,
    TERMINATION_TIME,
    TOKEN_HEADER,
    TTL_HEADER,
    FakeAwsMetadata,
)
from spotsafe.testing.clock import ManualClock
from spotsafe.testing.metadata import serve
from spotsafe.testing.tokens import TOKEN_PATH
from tests.testing import asking

WALL = 1_700_000_000.0  # 2023-11-14T22:13:20Z


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(wall=WALL)


@pytest.fixture
def aws(clock: ManualClock) -> Iterator[FakeAwsMetadata]:
    with FakeAwsMetadata(clock=clock) as fake:
        yield fake


def ask(
    fake: FakeAwsMetadata, method: str, path: str, *, timeout: float = 30.0, **headers: str
) -> tuple[int, str, dict[str, str]]:
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    return asking.ask(fake, method, path, told, timeout=timeout)


def token(fake: FakeAwsMetadata, ttl: int = 60) -> str:
    status, body, headers = ask(fake, "PUT", TOKEN_PATH, **{TTL_HEADER: str(ttl)})
    assert status == 200
    assert headers[TTL_HEADER.lower()] == str(ttl)
    return body


def key(fake: FakeAwsMetadata, name: str, with_token: str | None = None) -> tuple[int, str]:
    headers = {} if with_token is None else {TOKEN_HEADER: with_token}
    status, body, _ = ask(fake, "GET", f"/latest/meta-data/{name}", **headers)
    return status, body


def test_a_token_opens_the_keys_until_it_expires(aws: FakeAwsMetadata, clock: ManualClock):
    """Without one, or with a wrong or expired one, the answer is 401; with one, 404 for what is not set."""
    assert key(aws, INSTANCE_ACTION)[0] == 401
    assert key(aws, INSTANCE_ACTION, "made-up")[0] == 401
    mine = token(aws, ttl=60)
    assert key(aws, INSTANCE_ACTION, mine)[0] == 404
    assert key(aws, LIFE_CYCLE, mine) == (200, "spot")
    clock.advance(59.9)
    assert key(aws, LIFE_CYCLE, mine)[0] == 200
    clock.advance(0.1)
    assert key(aws, LIFE_CYCLE, mine)[0] == 401


@pytest.mark.parametrize("ttl", ["", "0", "21601", "-1", "abc", "1.5", "9" * 5000])
def test_a_token_needs_a_lifetime_in_range(ttl: str, aws: FakeAwsMetadata):
    """1 to 21600 seconds; everything else is 400."""
    assert ask(aws, "PUT", TOKEN_PATH, **{TTL_HEADER: ttl})[0] == 400


def test_a_token_without_a_lifetime_is_400(aws: FakeAwsMetadata):
    """The header is required."""
    assert ask(aws, "PUT", TOKEN_PATH)[0] == 400


@pytest.mark.parametrize("ttl", [1, 21600])
def test_the_limits_of_the_lifetime_are_allowed(ttl: int, aws: FakeAwsMetadata):
    """One second and six hours."""
    assert token(aws, ttl=ttl)


def test_puts_that_are_forbidden(aws: FakeAwsMetadata):
    """A forwarded request and a path with a version get no token."""
    lifetime = {TTL_HEADER: "60"}
    assert ask(aws, "PUT", TOKEN_PATH, X_Forwarded_For="10.0.0.1", **lifetime)[0] == 403
    assert ask(aws, "PUT", "/2021-03-23/api/token", **lifetime)[0] == 403


def test_other_methods_and_paths(aws: FakeAwsMetadata):
    """HEAD answers without a body, a dated version works like latest, POST is not offered."""
    mine = {TOKEN_HEADER: token(aws)}
    status, body, headers = ask(aws, "HEAD", f"/latest/meta-data/{LIFE_CYCLE}", **mine)
    assert (status, body, headers["content-length"]) == (200, "", "4")
    assert ask(aws, "GET", f"/2021-03-23/meta-data/{LIFE_CYCLE}", **mine)[:2] == (200, "spot")
    assert ask(aws, "GET", "/latest/dynamic/nothing", **mine)[0] == 404
    assert ask(aws, "POST", f"/latest/meta-data/{LIFE_CYCLE}", **mine)[0] == 405


def test_version_one_can_be_allowed(clock: ManualClock):
    """tokens_required=False answers without a token, but still not with a wrong one."""
    with FakeAwsMetadata(clock=clock, tokens_required=False) as fake:
        assert key(fake, LIFE_CYCLE)[0] == 200
        assert key(fake, LIFE_CYCLE, "made-up")[0] == 401


def test_answers_are_plain_text_with_the_services_own_date(aws: FakeAwsMetadata):
    """Content type and Date header are those of the real service, by the fake's clock."""
    _, _, headers = ask(aws, "GET", f"/latest/meta-data/{LIFE_CYCLE}", **{TOKEN_HEADER: token(aws)})
    assert headers["content-type"] == "text/plain"
    assert headers["server"].strip() == "EC2ws"
    assert parsedate_to_datetime(headers["date"]).timestamp() == WALL


class TestScripts:
    def test_a_notice_has_action_and_time(self, aws: FakeAwsMetadata):
        """The JSON of the documentation on one line, and the legacy key beside it."""
        aws.notice("stop", in_seconds=100)
        mine = token(aws)
        assert key(aws, INSTANCE_ACTION, mine) == (200, '{"action":"stop","time":"2023-11-14T22:15:00Z"}')
        assert key(aws, TERMINATION_TIME, mine) == (200, "2023-11-14T22:15:00Z")

    def test_a_recommendation_has_its_time(self, aws: FakeAwsMetadata):
        """noticeTime is when it was made."""
        aws.rebalance()
        assert key(aws, REBALANCE, token(aws)) == (200, '{"noticeTime":"2023-11-14T22:13:20Z"}')

    def test_what_is_due_later_is_seen_later(self, aws: FakeAwsMetadata, clock: ManualClock):
        """after_seconds keeps a key at 404 until the clock has come so far."""
        aws.notice(after_seconds=10)
        mine = token(aws)
        assert key(aws, INSTANCE_ACTION, mine)[0] == 404
        clock.advance(10)
        assert key(aws, INSTANCE_ACTION, mine)[0] == 200

    def test_cancel_takes_everything_back(self, aws: FakeAwsMetadata):
        """All keys that speak of an end are 404 again; the rest stays."""
        aws.notice()
        aws.rebalance()
        aws.cancel()
        aws.cancel()
        mine = token(aws)
        assert {key(aws, name, mine)[0] for name in (INSTANCE_ACTION, TERMINATION_TIME, REBALANCE)} == {404}
        assert key(aws, LIFE_CYCLE, mine)[0] == 200

    def test_any_key_can_be_set(self, aws: FakeAwsMetadata):
        """For what the two scripts do not cover."""
        aws.set_key("autoscaling/target-lifecycle-state", "Terminated")
        assert key(aws, "autoscaling/target-lifecycle-state", token(aws)) == (200, "Terminated")

    def test_requests_are_recorded(self, aws: FakeAwsMetadata):
        """Method, path, headers and status of each, in order."""
        key(aws, LIFE_CYCLE)
        mine = token(aws)
        key(aws, LIFE_CYCLE, mine)
        recorded = aws.wait_for_requests(3)
        assert [(each.method, each.status) for each in recorded] == [("GET", 401), ("PUT", 200), ("GET", 200)]
        assert recorded[2].path == f"/latest/meta-data/{LIFE_CYCLE}"
        assert recorded[2].headers[TOKEN_HEADER.lower()] == mine
        with pytest.raises(TimeoutError, match="3 of 4"):
            aws.wait_for_requests(4, patience_s=0.01)


class TestFaults:
    def test_a_burst_ends(self, aws: FakeAwsMetadata):
        """fail_next counts requests of any kind."""
        aws.fail_next(503, times=2)
        aws.fail_next(429)
        statuses = [key(aws, LIFE_CYCLE)[0] for _ in range(4)]
        assert statuses == [503, 503, 429, 401]

    def test_tokens_expire_on_demand(self, aws: FakeAwsMetadata):
        """At once, or after so many more uses; new ones work."""
        mine = token(aws)
        aws.expire_tokens()
        assert key(aws, LIFE_CYCLE, mine)[0] == 401
        mine = token(aws)
        assert key(aws, LIFE_CYCLE, mine)[0] == 200
        aws.expire_tokens(after_uses=2)
        assert [key(aws, LIFE_CYCLE, mine)[0] for _ in range(4)] == [200, 200, 401, 401]
        assert key(aws, LIFE_CYCLE, token(aws))[0] == 200

    def test_refusals_by_status(self, aws: FakeAwsMetadata):
        """Tokens, keys or everything can be refused for as long as wanted."""
        aws.faults.refuse_tokens = True
        assert key(aws, LIFE_CYCLE, token(aws))[0] == 401
        aws.faults.refuse_put = 404
        assert ask(aws, "PUT", TOKEN_PATH, **{TTL_HEADER: "60"})[0] == 404
        aws.faults.refuse_all = 410
        assert ask(aws, "PUT", TOKEN_PATH, **{TTL_HEADER: "60"})[0] == 410

    def test_a_dropped_put_never_answers_and_gets_do(self, clock: ManualClock):
        """As beyond the hop limit; stopping the fake lets go of it."""
        with FakeAwsMetadata(clock=clock, tokens_required=False) as fake:
            fake.faults.drop_put = True
            with pytest.raises(TimeoutError):
                ask(fake, "PUT", TOKEN_PATH, timeout=0.1, **{TTL_HEADER: "60"})
            assert key(fake, LIFE_CYCLE)[0] == 200
            assert fake.requests[0].status is None

    def test_latency_comes_before_the_answer(self, aws: FakeAwsMetadata):
        """A client with less patience sees a timeout."""
        aws.faults.latency_s = 60.0
        with pytest.raises(TimeoutError):
            ask(aws, "GET", "/", timeout=0.05)
        aws.faults.latency_s = 0.02
        began = time.monotonic()
        key(aws, LIFE_CYCLE)
        assert time.monotonic() - began >= 0.02

    def test_json_can_be_cut_and_so_can_the_connection(self, aws: FakeAwsMetadata):
        """Once as a whole answer with half the JSON, once as half an answer."""
        aws.notice()
        mine = token(aws)
        aws.faults.truncate_json = True
        status, body = key(aws, INSTANCE_ACTION, mine)
        assert status == 200
        with pytest.raises(json.JSONDecodeError):
            json.loads(body)
        aws.faults.truncate_json, aws.faults.cut_connection = False, True
        with pytest.raises(http.client.IncompleteRead):
            key(aws, INSTANCE_ACTION, mine)


class TestLife:
    def test_it_stops_and_starts_at_the_same_address(self, clock: ManualClock):
        """Stopped, it refuses connections; started again, it is where it was, and knows what it knew."""
        fake = FakeAwsMetadata(clock=clock)
        with pytest.raises(RuntimeError, match="start"):
            _ = fake.url
        fake.start()
        fake.start()
        fake.notice()
        url = fake.url
        fake.stop()
        fake.stop()
        with pytest.raises(ConnectionRefusedError):
            key(fake, LIFE_CYCLE)
        fake.start()
        assert fake.url == url
        assert key(fake, INSTANCE_ACTION, token(fake))[0] == 200
        fake.stop()

    def test_its_environment_points_a_program_at_it(self, aws: FakeAwsMetadata):
        """A subprocess with `environ` asks here, without a word of configuration."""
        aws.notice("terminate")
        program = "from spotsafe.reclaim.detect import detect; print(detect()[0].poll().action)"
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **aws.environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout == "terminate\n"

    def test_a_client_that_hangs_up_makes_no_noise(
        self, aws: FakeAwsMetadata, capfd: pytest.CaptureFixture[str]
    ):
        """Nothing is printed, neither for requests nor for broken connections."""
        aws.faults.latency_s = 0.05
        with pytest.raises(TimeoutError):
            ask(aws, "GET", "/", timeout=0.01)
        aws.wait_for_requests(1)
        key(aws, LIFE_CYCLE)
        assert capfd.readouterr() == ("", "")

    def test_serve_tells_a_person_what_to_do_and_announces(self):
        """The lines can be pasted into a shell; the notice comes after the time that was asked for."""
        lines, until, told = list[str](), threading.Event(), threading.Event()

        def say(line: str) -> None:
            lines.append(line)
            if len(lines) == 2:
                told.set()

        thread = threading.Thread(
            target=serve,
            args=(FakeAwsMetadata(),),
            kwargs={"notice_after_s": 0.0, "action": "terminate", "say": say, "until": until},
        )
        thread.start()
        assert told.wait(30)
        assert lines[0].startswith("export AWS_EC2_METADATA_SERVICE_ENDPOINT=http://127.0.0.1:")
        assert lines[1] == "in 0 s: terminate, 120 s ahead"
        until.set()
        thread.join(30)
        assert not thread.is_alive()
