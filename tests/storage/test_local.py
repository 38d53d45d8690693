"""The local store: what the conformance suite cannot see from outside."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotsafe.errors import (
    StorageError,
    StorageExists,
    StorageFull,
    StorageNotFolder,
    StorageNotFound,
    StorageRefused,
    StorageUnavailable,
)
from spotsafe.storage.local import LocalStore
from spotsafe.storage.paths import TEMPORARY
from spotsafe.testing.stores import MEBIBYTE, aligned_memory, pattern_bytes, read_all

IS_ROOT = os.geteuid() == 0


def temporaries(root: Path) -> list[Path]:
    return sorted(root.rglob(f"{TEMPORARY}*"))


def raising(number: int) -> Callable[..., None]:
    def call(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


class Recorder:
    """Notes the system calls of a commit, with the names of the files that they touch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []
        for name in ("write", "fdatasync", "fsync"):
            self._note(monkeypatch, name, self._of_descriptor)
        self._note(monkeypatch, "link", lambda source, target: target)
        self._note(monkeypatch, "rename", lambda source, target: target)
        self._note(monkeypatch, "mkdir", lambda path: path)
        self._note(monkeypatch, "unlink", lambda path: path)

    def _note(self, monkeypatch: pytest.MonkeyPatch, name: str, what: Callable[..., str]) -> None:
        real = getattr(os, name)

        def call(*args: object, **kwargs: object) -> object:
            self.calls.append((name, what(*args)))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    @staticmethod
    def _of_descriptor(fd: int, *_rest: object) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    def short(self, root: Path) -> list[tuple[str, str]]:
        """The calls, without repeated writes, with paths below `root` and one name for temporary files."""
        found: list[tuple[str, str]] = []
        for name, path in self.calls:
            folder, _, base = os.path.relpath(path, root).rpartition("/")
            base = "TEMP" if base.startswith(TEMPORARY) else base
            call = (name, f"{folder}/{base}" if folder else base)
            if not found or found[-1] != call:
                found.append(call)
        return found


# -- where it is


def test_nothing_is_made_before_the_first_write(tmp_path: Path) -> None:
    """Opening and looking leave the disk as it is."""
    store = LocalStore(tmp_path / "run")
    store.names("")
    store.delete("a/b")
    store.abort_uploads("")
    assert list(tmp_path.iterdir()) == []


def test_url_is_the_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path means the folder it meant when the store was made, also after a chdir."""
    monkeypatch.chdir(tmp_path)
    store = LocalStore("run/../other")
    monkeypatch.chdir("/")
    store.put("a", b"x")
    assert store.url == str(tmp_path / "other")
    assert (tmp_path / "other" / "a").read_bytes() == b"x"


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leading tilde is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert LocalStore("~/run").url == str(tmp_path / "run")


def test_an_empty_root_is_refused() -> None:
    """An empty variable in a script must not become the current folder."""
    with pytest.raises(ValueError, match="must not be empty"):
        LocalStore("")


@pytest.mark.parametrize("below", ["", "/run", "/deeper/run"])
def test_a_root_that_is_a_file(tmp_path: Path, below: str) -> None:
    """The error says that it is a file, names it, and is a `NotADirectoryError` too."""
    file = tmp_path / "results.txt"
    file.write_text("x")
    with pytest.raises(StorageNotFolder, match=r"results\.txt.*file.*give (the|a) path") as caught:
        LocalStore(f"{file}{below}")
    assert isinstance(caught.value, NotADirectoryError)
    assert isinstance(caught.value, StorageError)


def test_a_linked_root_is_followed(tmp_path: Path) -> None:
    """A run folder may be a link to a bigger disk."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    LocalStore(tmp_path / "run").put("a/b", b"x")
    assert (tmp_path / "disk" / "a" / "b").read_bytes() == b"x"


# -- durability


def test_order_of_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes, then their fdatasync, then the name, then the folder; new folders' names first of all."""
    store = LocalStore(tmp_path / "run")
    recorder = Recorder(monkeypatch)
    store.put("checkpoints/data", b"x")
    assert recorder.short(tmp_path) == [
        ("mkdir", "run"),
        ("fsync", "."),
        ("mkdir", "run/checkpoints"),
        ("fsync", "run"),
        ("write", "run/checkpoints/TEMP"),
        ("fdatasync", "run/checkpoints/TEMP"),
        ("link", "run/checkpoints/data"),
        ("unlink", "run/checkpoints/TEMP"),
        ("fsync", "run/checkpoints"),
    ]


@pytest.mark.parametrize("shift", [0, 1])
def test_order_of_a_large_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    """The same with O_DIRECT and without; a folder is made durable once."""
    store = LocalStore(tmp_path)
    store.put("first", b"x")
    recorder = Recorder(monkeypatch)
    store.put_large("large", aligned_memory(pattern_bytes(2 * MEBIBYTE + 1), shift=shift))
    assert recorder.short(tmp_path) == [
        ("write", "TEMP"),
        ("fdatasync", "TEMP"),
        ("link", "large"),
        ("unlink", "TEMP"),
        ("fsync", "."),
    ]


def test_order_of_a_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older object is replaced by a rename, after the new bytes are on the disk."""
    store = LocalStore(tmp_path)
    store.replace("heartbeat", b"1")
    recorder = Recorder(monkeypatch)
    store.replace("heartbeat", b"2")
    calls = recorder.short(tmp_path)
    assert calls[:3] == [("write", "TEMP"), ("fdatasync", "TEMP"), ("rename", "heartbeat")]
    assert calls[-1] == ("fsync", ".")


def test_folders_that_others_made_are_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one who made a folder may not have synced its name yet, so whoever writes into it does."""
    (tmp_path / "checkpoints" / "one").mkdir(parents=True)
    store = LocalStore(tmp_path)
    recorder = Recorder(monkeypatch)
    store.put("checkpoints/one/data", b"x")
    assert recorder.short(tmp_path)[:2] == [("fsync", "."), ("fsync", "checkpoints")]
    assert ("fsync", "..") not in recorder.short(tmp_path)


def test_a_deletion_is_durable_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest must never come back after its files have gone."""
    store = LocalStore(tmp_path)
    store.put("one/manifest", b"x")
    store.put("one/data", b"x")
    recorder = Recorder(monkeypatch)
    store.delete("one/manifest")
    store.delete("one/data")
    assert recorder.short(tmp_path) == [
        ("unlink", "one/manifest"),
        ("fsync", "one"),
        ("unlink", "one/data"),
        ("fsync", "one"),
    ]


def test_an_empty_folder_goes_with_its_last_object(tmp_path: Path) -> None:
    """A deleted checkpoint leaves no folder behind; the run's own folder stays."""
    store = LocalStore(tmp_path / "run")
    store.put("a/b/c", b"x")
    store.put("a/d", b"x")
    store.delete("a/b/c")
    assert store.names("a") == ["d"]
    store.delete("a/d")
    assert store.names("") == []
    assert (tmp_path / "run").is_dir()
    store.put("a/b/c", b"y")
    assert store.read("a/b/c", max_bytes=1) == b"y"


def test_a_folder_that_another_process_removed_is_made_again(tmp_path: Path) -> None:
    """A store that remembers a folder as made survives its being removed by somebody else."""
    store, other = LocalStore(tmp_path), LocalStore(tmp_path)
    store.put("a/b/c", b"x")
    other.delete("a/b/c")
    assert not (tmp_path / "a").exists()
    store.put("a/b/d", b"y")
    assert other.read("a/b/d", max_bytes=1) == b"y"


def test_writers_and_deleters_of_one_folder(tmp_path: Path) -> None:
    """A writer never fails because a deleter removed the empty folder under its feet."""
    from concurrent.futures import ThreadPoolExecutor

    def work(number: int) -> None:
        store = LocalStore(tmp_path)
        for turn in range(50):
            store.put(f"a/b/{number}-{turn}", b"x")
            store.delete(f"a/b/{number}-{turn}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert LocalStore(tmp_path).list("") == []


# -- errors


@pytest.mark.parametrize("step", ["write", "fdatasync", "link", "fsync", "close"])
@pytest.mark.parametrize(
    "failure",
    [
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
        (errno.EIO, StorageUnavailable),
        (errno.ESTALE, StorageUnavailable),
        (errno.EROFS, StorageRefused),
        (errno.ENOENT, StorageError),
    ],
)
@pytest.mark.parametrize("large", [False, True])
def test_a_failing_step_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    failure: tuple[int, type[StorageError]],
    large: bool,
) -> None:
    """Whatever fails: the right class, no temporary file, and no object unless it was linked already."""
    number, kind = failure
    store = LocalStore(tmp_path)
    store.put("earlier", b"good")
    real = getattr(os, step)

    def failing(*args: object, **kwargs: object) -> None:
        if step == "close":
            real(*args, **kwargs)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, step, failing)
    data = aligned_memory(pattern_bytes(MEBIBYTE + 1)) if large else memoryview(b"x")
    with pytest.raises(kind) as caught:
        store.put_large("object", data)
    monkeypatch.undo()
    assert not isinstance(caught.value, (StorageNotFound, StorageExists))
    assert isinstance(caught.value.__cause__, OSError)
    assert str(tmp_path / "object") in str(caught.value)
    assert caught.value.path == "object"
    assert temporaries(tmp_path) == []
    assert store.names("") == (["earlier", "object"] if step == "fsync" else ["earlier"])
    assert store.read("earlier", max_bytes=4) == b"good"


@pytest.mark.parametrize("step", ["write", "fdatasync", "link"])
def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """KeyboardInterrupt and the like go through as they are, and the temporary file goes too."""

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        LocalStore(tmp_path).put("object", b"x")
    assert list(tmp_path.iterdir()) == []


def test_a_repeated_put_after_a_failed_folder_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object found in the way may be our own that never became durable: its folder is synced then."""
    store = LocalStore(tmp_path)
    store.put("object", b"x")
    recorder = Recorder(monkeypatch)
    with pytest.raises(StorageExists, match="exists"):
        store.put("object", b"x")
    assert ("fsync", ".") in recorder.short(tmp_path)
    assert temporaries(tmp_path) == []


def test_writing_below_an_object(tmp_path: Path) -> None:
    """An object in the place of a folder is an error of the write, not "not found"."""
    store = LocalStore(tmp_path)
    store.put("object", b"x")
    with pytest.raises(StorageError, match="object/below") as caught:
        store.put("object/below", b"y")
    assert not isinstance(caught.value, StorageNotFound)


def test_putting_over_a_folder(tmp_path: Path) -> None:
    """A folder in the place of an object is left alone."""
    store = LocalStore(tmp_path)
    store.put("folder/object", b"x")
    with pytest.raises(StorageExists):
        store.put("folder", b"y")
    with pytest.raises(StorageError):
        store.replace("folder", b"y")
    assert store.read("folder/object", max_bytes=1) == b"x"
    assert temporaries(tmp_path) == []


def test_create_over_a_folder(tmp_path: Path) -> None:
    """A folder in the place of an object is said to be there; it is not waited for."""
    store = LocalStore(tmp_path)
    store.put("claim/object", b"x")
    with pytest.raises(StorageExists, match="claim exists"):
        store.create("claim", b"mine")


def test_create_gives_up_on_what_keeps_vanishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is taken and then empty, over and over, ends as "unavailable", not in a loop."""
    monkeypatch.setattr(os, "link", raising(errno.EEXIST))
    with pytest.raises(StorageUnavailable, match="vanishing"):
        LocalStore(tmp_path).create("object", b"x")
    assert temporaries(tmp_path) == []


def test_create_looks_again_when_the_other_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that was in the way and is gone now leaves the name to us."""
    real, calls = os.link, []

    def link(source: str, target: str) -> None:
        calls.append(target)
        if len(calls) == 1:
            raise OSError(errno.EEXIST, "exists")
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    store = LocalStore(tmp_path)
    assert store.create("object", b"x") is True
    assert store.read("object", max_bytes=1) == b"x"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_listing_that_fails_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """What could not be looked at is an error, never "there is none"."""
    store = LocalStore(tmp_path)
    store.put("a/b", b"x")
    monkeypatch.setattr(os, "scandir", raising(number))
    monkeypatch.setattr(os, "listdir", raising(number))
    for look in (store.list, store.names):
        with pytest.raises(StorageError) as caught:
            look("a")
        assert not isinstance(caught.value, StorageNotFound)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EACCES, StorageRefused), (errno.EIO, StorageUnavailable), (errno.ENOENT, StorageNotFound)],
)
def test_reading_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StorageError]
) -> None:
    """A read that fails is classified."""
    store = LocalStore(tmp_path)
    store.put("a", b"x")
    monkeypatch.setattr(os, "open", raising(number))
    with pytest.raises(kind):
        store.read("a", max_bytes=1)
    with pytest.raises(kind):
        store.read_into("a", 0, memoryview(bytearray(1)))


# -- short writes and reads


def test_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call that takes at most 1000 bytes at a time loses none."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data[:1000])))
    store = LocalStore(tmp_path)
    data = pattern_bytes(MEBIBYTE + 4097)
    store.put("small", data[:5000])
    store.put_large("aligned", aligned_memory(data))
    store.put_large("unaligned", aligned_memory(data, shift=1))
    assert store.read("small", max_bytes=5000) == data[:5000]
    assert read_all(store, "aligned") == data
    assert read_all(store, "unaligned") == data


def test_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call that gives a few bytes at a time gives all in the end."""
    store = LocalStore(tmp_path)
    data = pattern_bytes(5000)
    store.put("object", data)
    real_read, real_preadv = os.read, os.preadv
    monkeypatch.setattr(os, "read", lambda fd, count: real_read(fd, min(count, 7)))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real_preadv(fd, [views[0][:7]], at))
    assert store.read("object", max_bytes=5000) == data
    assert read_all(store, "object") == data


# -- temporary files


def test_temporary_files_are_never_shown(tmp_path: Path) -> None:
    """What a killed writer left is in no listing, cannot be named, and does not keep others from writing."""
    store = LocalStore(tmp_path)
    store.put("a/b", b"x")
    left = tmp_path / "a" / f"{TEMPORARY}0123"
    left.write_bytes(b"half")
    assert store.names("a") == ["b"]
    assert [entry.path for entry in store.list("")] == ["a/b"]
    with pytest.raises(ValueError, match="reserved"):
        store.read(f"a/{left.name}", max_bytes=10)


def test_abort_uploads_removes_temporary_files(tmp_path: Path) -> None:
    """Only below the folder, and a folder that held nothing else goes too."""
    store = LocalStore(tmp_path)
    store.put("a/b", b"x")
    for folder in ("a", "c/d", "e"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / f"{TEMPORARY}1").write_bytes(b"half")
    assert store.begun("c") == [f"c/d/{TEMPORARY}1"]
    assert store.begun("") == [f"{folder}/{TEMPORARY}1" for folder in ("a", "c/d", "e")]
    store.abort_uploads("c")
    assert not (tmp_path / "c").exists()
    assert len(temporaries(tmp_path)) == 2
    store.abort_uploads("")
    assert temporaries(tmp_path) == []
    assert store.names("") == ["a"]


# -- links and other strange files


def test_linked_objects_are_not_followed(tmp_path: Path) -> None:
    """A link in a run folder reads nothing outside it, and deleting it deletes only the link."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    store = LocalStore(tmp_path / "run")
    store.put("a", b"x")
    (tmp_path / "run" / "link").symlink_to(secret)
    for look in (
        lambda: store.read("link", max_bytes=100),
        lambda: store.read_into("link", 0, memoryview(bytearray(1))),
        lambda: store.size("link"),
        lambda: store.create("link", b"secret"),
    ):
        with pytest.raises(StorageError, match="symbolic link") as caught:
            look()
        assert not isinstance(caught.value, StorageNotFound)
    store.delete("link")
    assert secret.read_bytes() == b"secret"
    assert store.names("") == ["a"]


def test_replace_replaces_a_link(tmp_path: Path) -> None:
    """A link in the way of `replace` is replaced; what it points to is not."""
    target = tmp_path / "target"
    target.write_bytes(b"outside")
    store = LocalStore(tmp_path / "run")
    store.put("a", b"x")
    (tmp_path / "run" / "heartbeat").symlink_to(target)
    store.replace("heartbeat", b"inside")
    assert target.read_bytes() == b"outside"
    assert store.read("heartbeat", max_bytes=10) == b"inside"


def test_list_does_not_descend_into_links(tmp_path: Path) -> None:
    """A loop of links ends, and what lies outside is not listed; the name itself is seen."""
    store = LocalStore(tmp_path)
    store.put("a/b", b"x")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    assert "a/b" in [entry.path for entry in store.list("")]
    assert not [entry for entry in store.list("") if entry.path.startswith("a/loop/")]
    assert store.names("a") == ["b", "loop"]


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    """A named pipe in the place of an object is an error at once."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="no regular file"):
        LocalStore(tmp_path).read("pipe", max_bytes=1)


def test_no_descriptor_is_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither success nor failure leaks a file descriptor."""
    store = LocalStore(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    store.put("a", b"x")
    store.read("a", max_bytes=1)
    for step in ("write", "fdatasync", "link", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, raising(errno.EIO))
            with pytest.raises(StorageUnavailable):
                store.put("b" + step, b"x")
    assert len(os.listdir("/proc/self/fd")) == before


def test_too_many_open_files_may_be_tried_again(tmp_path: Path) -> None:
    """Running out of descriptors is a passing trouble of this process, not a missing object."""
    store = LocalStore(tmp_path)
    store.put("a", b"x")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(StorageUnavailable):
            store.read("a", max_bytes=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert store.read("a", max_bytes=1) == b"x"


# -- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MB."""
    if not IS_ROOT or shutil.which("mount") is None:
        pytest.skip("mounting a file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"mount is not permitted here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_full_disk(small_disk: Path, shift: int) -> None:
    """A save that does not fit fails as full, frees what it took, and leaves what was there good."""
    store = LocalStore(small_disk / "run")
    good = pattern_bytes(MEBIBYTE)
    store.put_large("good", aligned_memory(good))
    with pytest.raises(StorageFull, match="free some space") as caught:
        store.put_large("too-large", aligned_memory(pattern_bytes(6 * MEBIBYTE), shift=shift))
    assert caught.value.errno == errno.ENOSPC
    assert temporaries(small_disk) == []
    assert store.names("") == ["good"]
    assert read_all(store, "good") == good
    store.put_large("fits", aligned_memory(pattern_bytes(2 * MEBIBYTE), shift=shift))
    assert store.names("") == ["fits", "good"]


def test_a_disk_without_a_single_page(small_disk: Path) -> None:
    """A small object on a disk full to the brim fails as full too; reading and deleting still work."""
    store = LocalStore(small_disk)
    store.put("first", b"x")

    def fill(folder: str, size: int) -> None:
        for number in range(10_000):
            store.create(f"{folder}/{number:05d}", bytes(size))

    with pytest.raises(StorageFull):
        fill("filler", 64 * 1024)
    with pytest.raises(StorageFull):
        fill("claim", 4000)
    assert temporaries(small_disk) == []
    assert store.read("first", max_bytes=1) == b"x"
    store.delete("filler/00000")
    assert store.create("claim/again", b"mine") is True


# -- permissions, in a process that does not have root's

REFUSED_SCRIPT = """
import sys
from spotsafe.errors import StorageNotFound, StorageRefused
from spotsafe.storage.local import LocalStore

def refused(call, *args, **options):
    try:
        call(*args, **options)
    except StorageRefused as error:
        assert "permission" in str(error).lower(), error
        assert isinstance(error, PermissionError)
    else:
        raise SystemExit(f"{call} {args} was not refused")

store = LocalStore(sys.argv[1] + "/read-only")
refused(store.put, "b", b"x")
refused(store.create, "b", b"x")
refused(store.replace, "a", b"x")
refused(store.delete, "a")
assert store.read("a", max_bytes=1) == b"x"
refused(LocalStore, sys.argv[1] + "/closed/run")
store = LocalStore(sys.argv[1] + "/closed")
refused(store.list, "")
refused(store.names, "")
refused(store.read, "a", max_bytes=1)
refused(store.size, "a")
"""


def test_permissions_are_refusals(tmp_path: Path) -> None:
    """A folder without permission is "refused" for every operation, and never "there is none"."""
    prefix: list[str] = []
    if IS_ROOT:
        if shutil.which("setpriv") is None:
            pytest.skip("root writes everywhere, and there is no setpriv to drop that")
        drop = "-dac_override,-dac_read_search"
        prefix = ["setpriv", f"--bounding-set={drop}", f"--inh-caps={drop}"]
    for name, mode in (("read-only", 0o555), ("closed", 0o000)):
        LocalStore(tmp_path / name).put("a", b"x")
        (tmp_path / name).chmod(mode)
    try:
        done = subprocess.run(
            [*prefix, sys.executable, "-c", REFUSED_SCRIPT, str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        for name in ("read-only", "closed"):
            (tmp_path / name).chmod(0o755)
    assert done.returncode == 0, done.stdout + done.stderr
    assert temporaries(tmp_path) == []


# -- SIGKILL

KILLED_SCRIPT = """
import os, signal, sys
from spotsafe.storage.local import LocalStore
from spotsafe.testing.stores import MEBIBYTE, aligned_memory, pattern_bytes

root, step, when = sys.argv[1:]
real = getattr(os, step)
calls = 0

def killed(*args, **options):
    global calls
    calls += 1
    if when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = real(*args, **options)
    if when == "after" or calls == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

store = LocalStore(root)
store.put("first", b"x")
setattr(os, step, killed)
store.put_large("large", aligned_memory(pattern_bytes(20 * MEBIBYTE + 5)))
"""


@pytest.mark.parametrize(
    ("step", "when", "there"),
    [
        ("write", "before", False),
        ("write", "second", False),
        ("fdatasync", "before", False),
        ("link", "before", False),
        ("link", "after", True),
        ("fsync", "before", True),
    ],
)
def test_a_killed_writer_leaves_all_or_nothing(tmp_path: Path, step: str, when: str, there: bool) -> None:
    """SIGKILL in the middle of a large write: no object before the link, the whole one after it."""
    root = tmp_path / "run"
    done = subprocess.run([sys.executable, "-c", KILLED_SCRIPT, str(root), step, when], check=False)
    assert done.returncode == -signal.SIGKILL
    store = LocalStore(root)
    assert store.names("") == (["first", "large"] if there else ["first"])
    if there:
        assert read_all(store, "large") == pattern_bytes(20 * MEBIBYTE + 5)
    if step != "fsync":
        assert len(temporaries(root)) == 1
    store.abort_uploads("")
    assert temporaries(root) == []
    if not there:
        store.put_large("large", memoryview(b"again"))
        assert read_all(store, "large") == b"again"
