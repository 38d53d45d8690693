"""The servers of the tests are what their fixtures say, and do not outlive the tests."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import servers

FIXTURES = ["seaweedfs", "fake_gcs", "azurite", "rclone_s3", "gcp_emulator"]


@pytest.mark.slow
@pytest.mark.parametrize("fixture", FIXTURES)
def test_a_client_keeps_and_finds_an_object(fixture: str, request: pytest.FixtureRequest):
    """The bucket is there, and the options lead a client to it."""
    import fsspec

    server: servers.Server = request.getfixturevalue(fixture)
    path = server.url(f"test-servers/{fixture}").partition("://")[2]
    fs = fsspec.filesystem(server.root.partition("://")[0], skip_instance_cache=True, **server.options)

    fs.pipe_file(path, b"mine", mode="overwrite")

    assert fs.cat_file(path) == b"mine"


def test_a_server_dies_with_the_tests(tmp_path: Path):
    """Also when they are killed, a server is gone at once."""
    script = (
        "import sys, time; from pathlib import Path; from tests.servers import launch;"
        "print(launch(['/bin/sleep', '1000'], folder=Path(sys.argv[1])).pid, flush=True); time.sleep(1000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    ) as tests:
        assert tests.stdout is not None
        pid = int(tests.stdout.readline())
        tests.kill()

    # Whoever adopts it may take a moment to bury it; until then it is a zombie.
    assert _wait_for(lambda: _is_gone(pid))


def test_a_missing_server_is_an_error_in_ci_and_a_skip_elsewhere(monkeypatch: pytest.MonkeyPatch):
    """On a machine without the programs the tests go on and say so; in CI they do not."""
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-program is not installed"):
        servers.program("no-such-program")

    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match="no-such-program is not installed"):
        servers.program("no-such-program")


def test_a_server_that_ends_at_once_is_an_error_with_its_output(tmp_path: Path):
    """What went wrong is in the failure's text."""

    def start(folder: Path) -> tuple[servers.Server, object]:
        process = servers.launch(["/bin/sh", "-c", "echo no room; exit 3"], folder=folder)
        server = servers.Server(
            name="sh", endpoint="http://127.0.0.1:1", root="x://y", options={}, env={}, process=process
        )
        return server, lambda _server: False

    with pytest.raises(pytest.fail.Exception, match="no room"), servers.running(start, tmp_path):
        pass


def test_azurite_is_pinned_as_the_python_packages_are():
    """The lock holds the version that is asked for, a digest of everything, and no registry's address."""
    folder = Path(__file__).parent.parent / "requirements" / "azurite"
    asked = json.loads((folder / "package.json").read_text())["dependencies"]
    locked = json.loads((folder / "package-lock.json").read_text())["packages"]

    assert asked == {"azurite": locked["node_modules/azurite"]["version"]}
    assert all("integrity" in package for name, package in locked.items() if name)
    assert not any("resolved" in package for package in locked.values())


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in {"Z", "X"}
    except FileNotFoundError:
        return True


def _wait_for(condition, limit_s: float = 20.0) -> bool:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
