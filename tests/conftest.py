"""What holds for every test: no launcher or cloud of the machine shows through, and no example is random."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# A suite's failure says what differed, as a test's does.
pytest.register_assert_rewrite("spotsafe.testing.stores")

from tests import servers  # noqa: E402 - after what has to come before imports

# Recent gcsfs asks a gRPC service about every bucket, for a minute each where there is none. Read at its import.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

# A deadline would make a busy machine fail a correct test; `too_slow` is the same thing in another place.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

_OF_LAUNCHERS = ("AWS_", "SKYPILOT_", "SLURM", "SPOTSAFE_", "TORCHELASTIC_", "MASTER_", "KUBERNETES_")
_OF_RANKS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"}
_KEPT = {"SPOTSAFE_PROOF"}  # where `tests.proof` writes


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever launched the tests, each begins as a plain process on a machine of no cloud."""
    for name in list(os.environ):
        if (name.startswith(_OF_LAUNCHERS) or name in _OF_RANKS) and name not in _KEPT:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest) -> None:
    """A full count takes minutes, and that is no hang."""
    if request.node.get_closest_marker("prove") is not None:
        faulthandler.cancel_dump_traceback_later()


def _server(name: str, start: servers.Start) -> object:
    """A fixture: the server, started when a test first asks for it."""

    @pytest.fixture(scope="session", name=name)
    def fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
        with servers.running(start, tmp_path_factory.mktemp(name)) as server:
            yield server

    return fixture


seaweedfs = _server("seaweedfs", servers.start_seaweedfs)  # a real S3 server
seaweedfs_tls = _server("seaweedfs_tls", servers.start_seaweedfs_tls)  # the same over https
fake_gcs = _server("fake_gcs", servers.start_fake_gcs)  # Google Cloud Storage's JSON API
azurite = _server("azurite", servers.start_azurite)  # Azure Blob Storage
rclone_s3 = _server("rclone_s3", servers.start_rclone_s3)  # S3, but it ignores conditions
gcp_emulator = _server("gcp_emulator", servers.start_gcp_emulator)  # the same for Google
