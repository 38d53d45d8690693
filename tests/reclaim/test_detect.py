"""What is watched is known at once, without a network, and is nothing where there is nothing."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spotsafe.events import WatcherBlind
from spotsafe.reclaim.aws import AwsWatcher
from spotsafe.reclaim.azure import AzureWatcher
from spotsafe.reclaim.detect import detect, read_dmi
from spotsafe.reclaim.file import FileWatcher
from spotsafe.reclaim.gcp import GcpWatcher
from spotsafe.reclaim.watcher import Watch
from spotsafe.testing.sinks import RecordingSink
from spotsafe.testing.watchers import ScriptedWatcher


def firmware(**fields: str) -> Callable[[str], str]:
    return lambda field: fields.get(field, "")


LAPTOP = firmware(sys_vendor="LENOVO")
EC2 = firmware(sys_vendor="Amazon EC2")


def test_a_laptop_polls_nothing():
    """Off every cloud there are signals and nothing else."""
    assert detect(environ={}, dmi=LAPTOP) == []


def test_ec2_polls_its_metadata():
    """The firmware's word is enough."""
    [watcher] = detect(environ={}, dmi=EC2)
    assert isinstance(watcher, AwsWatcher)


def test_compute_engine_polls_its_metadata():
    """The firmware's word is enough there too."""
    [watcher] = detect(environ={}, dmi=firmware(product_name="Google Compute Engine"))
    assert isinstance(watcher, GcpWatcher)


def test_azure_polls_its_metadata():
    """By vendor and asset tag."""
    tag = "7783-7084-3265-9085-8269-3286-77"
    [watcher] = detect(environ={}, dmi=firmware(sys_vendor="Microsoft Corporation", chassis_asset_tag=tag))
    assert isinstance(watcher, AzureWatcher)


def test_variables_turn_sources_on_anywhere(tmp_path: Path):
    """A notice file and an endpoint are watched on any machine; the file is named first."""
    environ = {
        "SPOTSAFE_NOTICE_FILE": str(tmp_path / "notice"),
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1",
    }
    found = detect(environ=environ, dmi=LAPTOP)
    assert [type(each) for each in found] == [FileWatcher, AwsWatcher]
    assert [each.name for each in found] == ["file", "aws"]


def test_the_process_environment_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without arguments it looks at this process and this machine."""
    monkeypatch.setenv("SPOTSAFE_NOTICE_FILE", str(tmp_path / "notice"))
    assert "file" in [each.name for each in detect()]


def test_none_polls_nothing_even_on_a_cloud():
    """watch=None is a decision."""
    assert detect(None, environ={}, dmi=EC2) == []


def test_a_list_is_taken_as_it_is():
    """One's own watchers replace what would be found."""
    mine = ScriptedWatcher()
    assert detect([mine], environ={}, dmi=EC2) == [mine]
    assert detect((), environ={}, dmi=EC2) == []


@pytest.mark.parametrize(
    "wrong", ["aws", "", b"auto", 5, True, ScriptedWatcher(), [object()], ["auto"], [None]]
)
def test_what_is_no_list_of_watchers_is_named(wrong: object):
    """The mistake is found here, with the choices, not in a thread later."""
    with pytest.raises(TypeError, match=r"write|is not a watcher"):
        detect(wrong)  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize(
    "environ",
    [
        {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "169.254.169.254"},
        {"AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE": "both"},
    ],
)
def test_a_variable_without_a_usable_value_is_an_error(environ: dict[str, str]):
    """A typing mistake is not silence."""
    with pytest.raises(ValueError, match=r"169\.254|MODE"):
        detect(environ=environ, dmi=EC2)


def test_looking_around_touches_no_network(monkeypatch: pytest.MonkeyPatch):
    """Whatever the machine is, no socket is made and no name is resolved."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert len(detect(environ={}, dmi=EC2)) == 1
    assert detect(environ={}, dmi=LAPTOP) == []


@pytest.mark.slow
def test_an_address_that_never_answers_does_not_delay_the_start():
    """Believing to be on EC2 where the address is blackholed costs a start nothing; it is told as blindness."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = [socket.socket() for _ in range(8)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        sink = RecordingSink()
        began = time.monotonic()
        watch = Watch(detect(environ={"AWS_EC2_METADATA_SERVICE_ENDPOINT": url}, dmi=LAPTOP), emit=sink.emit)
        watch.start()
        assert time.monotonic() - began < 0.9
        assert watch.notice is None
        assert sink.wait_for(WatcherBlind)[0].source == "aws"
        watch.stop()
        for filler in fillers:
            filler.close()


def test_reading_the_firmware_never_fails():
    """A field that does not exist is empty; so is one that only root may read."""
    assert read_dmi("no_such_field") == ""
    assert isinstance(read_dmi("sys_vendor"), str)
    if not os.path.exists("/sys/class/dmi/id/sys_vendor"):
        assert read_dmi("sys_vendor") == ""
