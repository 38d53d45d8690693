"""From what a user writes to a store, and to a key for the place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fsspec import config
from fsspec.registry import _registry

from spotsafe.errors import StorageError, StorageNotFolder
from spotsafe.storage.local import LocalStore
from spotsafe.storage.open import Reopening, local_path, open_store, reopening, same_place, use_settings
from spotsafe.storage.remote import FsspecStore
from spotsafe.storage.retrying import RetryingStore


def test_a_store_is_returned_as_it_is(tmp_path: Path) -> None:
    """What a test or an embedder made is not wrapped."""
    store = LocalStore(tmp_path)
    assert open_store(store) is store


@pytest.mark.parametrize("spelling", ["{}/run", "file://{}/run", "local://{}/run", "{}/x/../run/"])
def test_local_places(tmp_path: Path, spelling: str) -> None:
    """Paths and file urls lead to the durable local store, with retries, and make nothing yet."""
    store = open_store(spelling.format(tmp_path))
    assert isinstance(store, RetryingStore)
    assert isinstance(store.inner, LocalStore)
    assert store.url == str(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_path_objects(tmp_path: Path) -> None:
    """A `pathlib.Path` is a path."""
    assert open_store(tmp_path / "run").url == str(tmp_path / "run")


def test_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tilde is expanded, with and without file://."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/run").url == str(tmp_path / "run")
    assert open_store("file://~/run").url == str(tmp_path / "run")
    assert same_place("~/run") == f"file://{tmp_path.resolve()}/run"


def test_remote_places() -> None:
    """Every other url leads to fsspec, with retries."""
    store = open_store("memory://bucket/run/")
    assert isinstance(store, RetryingStore)
    assert isinstance(store.inner, FsspecStore)
    assert store.url == "memory://bucket/run"


def test_a_url_with_one_slash_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who forgets a slash saves to a disk that goes with the machine; the message has both spellings."""
    with pytest.raises(ValueError, match=r"s3:/bucket/run: .* s3://bucket/run; .* write \./s3:/bucket/run"):
        open_store("s3:/bucket/run")
    monkeypatch.chdir(tmp_path)
    for path in ("./s3:/bucket/run", "a:b/run", "x/s3:/run"):
        assert open_store(path).url == str(tmp_path / path)


def test_a_file_is_no_run(tmp_path: Path) -> None:
    """The error comes at once, by name, before any training."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageNotFolder, match="file, not a folder"):
        open_store(str(tmp_path / "file"))
    with pytest.raises(StorageNotFolder, match="lies below a file"):
        open_store(f"file://{tmp_path}/file/run")


@pytest.mark.parametrize("target", ["", "file://"])
def test_nothing_is_no_place(target: str) -> None:
    """An empty variable is not the current folder."""
    with pytest.raises(ValueError, match="empty"):
        open_store(target)


def test_unknown_protocols() -> None:
    """The message names what was given and what can be."""
    with pytest.raises(ValueError, match="unknown protocol 's4'"):
        open_store("s4://bucket/run")


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the extra."""
    for name in ("obstore", "boto3", "s3fs"):
        monkeypatch.setitem(sys.modules, name, None)
    forget(monkeypatch)
    with pytest.raises(StorageError, match=r"spotsafe\[s3\]"):
        open_store("s3://bucket/run")


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let modules that need optional packages be imported anew."""
    for name in ("fast", "s3", "s3_client"):
        monkeypatch.delitem(sys.modules, f"spotsafe.storage.{name}", raising=False)
    for protocol in ("s3", "s3a"):  # fsspec remembers what it has imported
        monkeypatch.delitem(_registry, protocol, raising=False)


@pytest.mark.parametrize("url", ["s3://bucket/run", "s3a://bucket/run"])
@pytest.mark.parametrize(
    ("missing", "expected"),
    [((), "FastS3Store"), (("obstore",), "S3Store"), (("obstore", "boto3"), "FsspecStore")],
)
def test_s3_by_the_best_client(
    monkeypatch: pytest.MonkeyPatch, url: str, missing: tuple[str, ...], expected: str
) -> None:
    """obstore and boto3, else boto3 alone, else s3fs: whatever is installed."""
    for package in ("obstore", "boto3", "s3fs"):
        pytest.importorskip(package)
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    forget(monkeypatch)
    store = open_store(url)
    assert isinstance(store, RetryingStore)
    assert type(store.inner).__name__ == expected


def test_s3_by_a_chosen_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name in the environment chooses; one that is not installed, or not a client, is an error that says so."""
    for package in ("obstore", "boto3", "s3fs"):
        pytest.importorskip(package)
    forget(monkeypatch)
    for client, expected in (("obstore", "FastS3Store"), ("boto3", "S3Store"), ("s3fs", "FsspecStore")):
        monkeypatch.setenv("SPOTSAFE_S3_CLIENT", client)
        store = open_store("s3://bucket/run")
        assert isinstance(store, RetryingStore)
        assert type(store.inner).__name__ == expected
    monkeypatch.setenv("SPOTSAFE_S3_CLIENT", "boto")
    with pytest.raises(ValueError, match="one of obstore, boto3, s3fs, not 'boto'"):
        open_store("s3://bucket/run")
    monkeypatch.setenv("SPOTSAFE_S3_CLIENT", "boto3")
    monkeypatch.setitem(sys.modules, "boto3", None)
    forget(monkeypatch)
    with pytest.raises(StorageError, match="asks for boto3"):
        open_store("s3://bucket/run")


def test_the_deadline_reaches_the_retries(tmp_path: Path) -> None:
    """A deadline given here is the one that is asked."""
    asked = []

    def deadline() -> float:
        asked.append(1)
        return 0.0

    store = open_store(tmp_path, deadline=deadline)
    assert isinstance(store, RetryingStore)
    assert store._deadline is deadline


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("run", "run"),
        ("/a/b", "/a/b"),
        ("file:///a/b", "/a/b"),
        ("local:///a", "/a"),
        ("a:b", "a:b"),
        ("s3://bucket/run", None),
        ("simplecache::s3://bucket/run", None),
        ("memory://a", None),
    ],
)
def test_local_path(url: str, path: str | None) -> None:
    """Which targets lie on this machine."""
    assert local_path(url) == path


def test_same_place_of_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative, linked, doubled and trailing spellings give one key; neighbours another."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    spellings = ["run", "./run/", f"{tmp_path}/run", f"file://{tmp_path}//run", "link", "x/../run"]
    assert len({same_place(spelling) for spelling in spellings}) == 1
    assert same_place("run") != same_place("run2")
    assert same_place(LocalStore("run").url) == same_place("run")


def test_same_place_of_urls() -> None:
    """Slashes at the end and names of one protocol do not matter; the rest does."""
    assert same_place("s3://b/run/") == same_place("s3a://b/run") == same_place("S3://b/run")
    assert same_place("gs://b/run") == same_place("gcs://b/run")
    assert same_place("memory://a") == same_place("memory:///a")
    assert same_place("s3://b/run") != same_place("gs://b/run")
    assert same_place("s3://b/run") != same_place("s3://b/Run")
    assert same_place("s3://b//run") != same_place("s3://b/run")


def test_a_local_run_imports_neither_fsspec_nor_numpy_nor_torch() -> None:
    """`spotsafe ls` on a local disk starts fast."""
    code = (
        "import sys; from spotsafe.storage.open import open_store; open_store('/nowhere').names('');"
        "print([name for name in ('fsspec', 'numpy', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_path_is_opened_again_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has another working folder."""
    monkeypatch.chdir(tmp_path)
    for target in ("run", Path("run"), f"file://{tmp_path}/run"):
        assert reopening(target) == Reopening(url=str(tmp_path / "run"))


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", "az://container/run"])
def test_a_bucket_is_opened_again_by_its_url(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the program has set for fsspec."""
    monkeypatch.setattr(config, "conf", {"s3": {"key": "k"}})
    assert reopening(url) == Reopening(url=url, settings={"s3": {"key": "k"}})
    there: dict[str, object] = {"old": 1}
    monkeypatch.setattr(config, "conf", there)
    use_settings({"s3": {"key": "k"}})
    assert there == {"s3": {"key": "k"}}
    use_settings({})
    assert there == {"s3": {"key": "k"}}


def test_what_is_only_in_this_process_is_not_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object, its memory, a file system or a setting that only this program has."""
    for target in (LocalStore(tmp_path), "memory://run", "simplecache::s3://bucket/run", "nobodys://run"):
        assert reopening(target) is None

    class Mine:
        """Registered in place of the real one."""

    with monkeypatch.context() as patch:
        patch.setitem(_registry, "s3", Mine)
        assert reopening("s3://bucket/run") is None
    with monkeypatch.context() as patch:
        patch.setattr(config, "conf", {"s3": {"session": object()}})
        assert reopening("s3://bucket/run") is None
