"""`spotsafe fake-metadata`: what it prints makes a program hear of its end."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from click.testing import Result

from spotsafe.reclaim.aws import AwsWatcher
from spotsafe.testing.aws import FakeAwsMetadata


def test_a_notice_comes_when_it_was_asked_for() -> None:
    """The first line is for a shell; Ctrl-C ends it well."""
    command = [
        sys.executable,
        "-m",
        "spotsafe",
        "fake-metadata",
        "aws",
        "--notice-in",
        "0",
        "--action",
        "stop",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as fake:
        assert fake.stdout is not None
        name, _, value = fake.stdout.readline().strip().removeprefix("export ").partition("=")
        assert fake.stdout.readline().strip() == "in 0 s: stop, 120 s ahead"
        watcher = AwsWatcher(environ={name: value})
        notice = watcher.poll()
        watcher.close()
        fake.send_signal(signal.SIGINT)
        assert fake.wait(30) == 0
    assert notice is not None
    assert notice.action == "stop"


def test_every_cloud_is_offered(call: Callable[..., Result]) -> None:
    """The help names them."""
    assert "{aws|gcp|azure" in call("fake-metadata", "--help").output


def test_a_port_that_is_taken(call: Callable[..., Result]) -> None:
    """An error that names it."""
    with FakeAwsMetadata() as other:
        port = other.url.rpartition(":")[2]
        result = call("fake-metadata", "aws", "--port", port)
    assert result.exit_code == 1
    assert f"port {port} cannot be listened on" in result.output


@pytest.mark.parametrize(
    "arguments",
    [["nowhere"], ["aws", "--notice-in", "-1"], ["aws", "--port", "70000"], ["aws", "--action", "explode"]],
)
def test_what_makes_no_sense(call: Callable[..., Result], arguments: list[str]) -> None:
    """The command line is wrong."""
    assert call("fake-metadata", *arguments).exit_code == 2
