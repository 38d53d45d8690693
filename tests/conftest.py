"""What holds for every test: no launcher or cloud of the machine shows through, and no example is random."""

from __future__ import annotations

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


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """A real S3 server."""
    with servers.running(servers.start_seaweedfs, tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """A server that speaks Google Cloud Storage's JSON API."""
    with servers.running(servers.start_fake_gcs, tmp_path_factory.mktemp("fake_gcs")) as server:
        yield server


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """A server that speaks Azure Blob Storage."""
    with servers.running(servers.start_azurite, tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(scope="session")
def rclone_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """An S3 server that ignores conditions."""
    with servers.running(servers.start_rclone_s3, tmp_path_factory.mktemp("rclone_s3")) as server:
        yield server


@pytest.fixture(scope="session")
def gcp_emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """A server that speaks Google Cloud Storage's JSON API and ignores conditions."""
    with servers.running(servers.start_gcp_emulator, tmp_path_factory.mktemp("gcp_emulator")) as server:
        yield server
