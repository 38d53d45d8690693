"""The fakes of Alibaba and Tencent answer as their documentation says."""

from __future__ import annotations

import pytest

from spotsafe.testing.alibaba import FakeAlibabaMetadata
from spotsafe.testing.clock import ManualClock
from spotsafe.testing.metadata import FakeMetadata
from spotsafe.testing.tencent import FakeTencentMetadata
from tests.testing import asking

WALL = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC
ALIBABA = "/latest/meta-data/instance/spot/termination-time"
TENCENT = "/latest/meta-data/spot/termination-time"


def ask(fake: FakeMetadata, method: str, path: str, **headers: str) -> tuple[int, str]:
    told = {name.replace("_", "-"): text for name, text in headers.items()}
    return asking.ask(fake, method, path, told)[:2]


@pytest.mark.parametrize("hardened", [False, True])
def test_alibaba(hardened: bool) -> None:
    """A time in UTC; the hardened mode wants a token, the normal one takes one, but no false one."""
    clock = ManualClock(wall=WALL)
    with FakeAlibabaMetadata(clock=clock, tokens_required=hardened) as fake:
        assert ask(fake, "GET", ALIBABA)[0] == (401 if hardened else 404)
        status, token = ask(fake, "PUT", "/latest/api/token", X_aliyun_ecs_metadata_token_ttl_seconds="60")
        assert status == 200
        fake.notice(in_seconds=300, after_seconds=10)
        assert ask(fake, "GET", ALIBABA, X_aliyun_ecs_metadata_token=token)[0] == 404
        clock.advance(10)
        found = ask(fake, "GET", ALIBABA, X_aliyun_ecs_metadata_token=token)
        assert found == (200, "2023-11-14T22:18:20Z")
        assert ask(fake, "GET", ALIBABA, X_aliyun_ecs_metadata_token="false")[0] == 401
        clock.advance(60)
        assert ask(fake, "GET", ALIBABA, X_aliyun_ecs_metadata_token=token)[0] == 401
        assert ask(fake, "PUT", "/latest/api/token")[0] == 400
        assert ask(fake, "POST", ALIBABA)[0] == 405


def test_tencent() -> None:
    """A time in UTC+8 without a zone; no token, no other way to ask."""
    clock = ManualClock(wall=WALL)
    with FakeTencentMetadata(clock=clock) as fake:
        assert ask(fake, "GET", TENCENT)[0] == 404
        fake.notice(in_seconds=120, after_seconds=10)
        assert ask(fake, "GET", TENCENT)[0] == 404
        clock.advance(10)
        assert ask(fake, "GET", TENCENT) == (200, "2023-11-15 06:15:20")
        assert ask(fake, "GET", "/latest/meta-data/instance-id")[0] == 200
        assert ask(fake, "GET", "/spot/termination-time")[0] == 404
        assert ask(fake, "PUT", TENCENT)[0] == 405
        fake.cancel()
        assert ask(fake, "GET", TENCENT)[0] == 404
