"""Which file systems are known to say "written" too soon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spotsafe.storage import mounts
from spotsafe.storage.local import LocalStore
from spotsafe.storage.mounts import Mount, doubt_about, durability_doubt, mount_of, parse_mounts
from spotsafe.storage.store import Entry
from spotsafe.testing.stores import MEBIBYTE, aligned_memory, pattern_bytes, read_all
from tests import servers
from tests.storage.fuse import mounted_by, unmounter

TABLE = r"""
/dev/vda / ext4 rw,relatime 0 0
tmpfs /dev/shm tmpfs rw 0 0
server:/x /data nfs4 rw,hard,vers=4.2 0 0
bucket: /data/my\040bucket fuse.rclone rw,nosuid,user_id=0 0 0
/dev/vdb /data/my\040bucket ext4 rw 0 0
/dev/fuse /mnt/plain fuse rw 0 0
share /mnt/9p 9p rw,cache=loose 0 0
share /mnt/9p-safe 9p rw,cache=none 0 0
/dev/sda1 /mnt/ntfs fuseblk rw 0 0
odd line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/run", "ext4"),
        ("/dev/shm/run", "tmpfs"),
        ("/dev/shmoo", "ext4"),
        ("/data", "nfs4"),
        ("/data/run", "nfs4"),
        ("/data/my bucket/run", "ext4"),  # mounted over the other
        ("/mnt/plain", "fuse"),
    ],
)
def test_a_path_lies_on_the_deepest_and_last_mount(path: str, kind: str) -> None:
    """A name that only begins like a mount's does not lie on it."""
    found = mount_of(path, parse_mounts(TABLE))
    assert found is not None
    assert found.kind == kind


def test_a_table_that_says_nothing() -> None:
    """Nothing is known then."""
    assert parse_mounts("") == []
    assert parse_mounts("odd line\n\n") == []
    assert mount_of("/run", []) is None


@pytest.mark.parametrize(
    ("kind", "options", "word"),
    [
        ("ext4", "rw", None),
        ("xfs", "rw", None),
        ("nfs4", "rw,hard", None),
        ("lustre", "rw", None),
        ("overlay", "rw", None),
        ("fuseblk", "rw", None),
        ("fuse.mergerfs", "rw", None),
        ("9p", "rw,cache=none", None),
        ("9p", "rw,cache=loose", "write cache"),
        ("tmpfs", "rw", "memory"),
        ("ramfs", "rw", "memory"),
        ("fuse", "rw", "own url"),
        ("fuse.rclone", "rw", "own url"),
        ("fuse.gcsfuse", "rw", "own url"),
        ("fuse.s3fs", "rw", "own url"),
    ],
)
def test_what_is_doubted(kind: str, options: str, word: str | None) -> None:
    """User-space file systems and memory; each doubt says what to do. Disks and real shares are trusted."""
    doubt = doubt_about(Mount(point="/mnt", kind=kind, options=frozenset(options.split(","))))
    if word is None:
        assert doubt is None
    else:
        assert doubt is not None
        assert word in doubt
        assert "/mnt" in doubt


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only places on this machine have a mount; links are followed; a system without the table is no error."""
    assert durability_doubt("s3://bucket/run") is None
    (tmp_path / "link").symlink_to("/dev/shm")
    on_memory = durability_doubt(f"file://{tmp_path}/link/run")
    assert on_memory is None or "/dev/shm" in on_memory  # not every machine has it in memory

    def no_table(*_args: object, **_kwargs: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(mounts, "open", no_table, raising=False)
    assert durability_doubt(str(tmp_path)) is None


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder behind a user-space file system, if this machine lets us mount one."""
    unmounter()
    base = tmp_path_factory.mktemp("fuse")
    behind, point = base / "behind", base / "mount"
    behind.mkdir()
    point.mkdir()
    command = [servers.program("rclone"), "mount", str(behind), str(point)]
    command += ["--config", str(base / "none.conf"), "--cache-dir", str(base / "cache")]
    command += ["--vfs-cache-mode", "writes", "--vfs-write-back", "0s"]
    with mounted_by(command, base=base, point=point):
        yield point


@pytest.mark.slow
def test_a_local_store_on_a_real_mount(mounted: Path) -> None:
    """Without hard links; few operations, for each takes its cache a second. `test_fuse` has the whole suite."""
    store = LocalStore(mounted / "run")
    data = pattern_bytes(MEBIBYTE + 77)
    store.put_large("folder/large", aligned_memory(data))
    assert store.create("folder/claim", b"mine")
    assert not store.create("folder/claim", b"else")
    assert store.list("") == [Entry("folder/claim", 4), Entry("folder/large", len(data))]
    assert read_all(store, "folder/large") == data
    store.delete("folder/claim")
    assert store.names("folder") == ["large"]


@pytest.mark.slow
def test_a_real_mount_is_doubted(mounted: Path) -> None:
    """As the kernel of this machine names it."""
    doubt = durability_doubt(str(mounted / "run"))
    assert doubt is not None
    assert "fuse.rclone" in doubt
