"""Links in a run that lead out of it: nothing there is read, written or deleted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import spotsafe
from spotsafe.errors import SpotsafeError, StorageLinked
from spotsafe.storage.local import LocalStore
from spotsafe.storage.open import open_store
from tests.security.forging import COMMANDS, command, trained
from tests.session.rig import Program


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def moved_out(run: Path, outside: Path, what: str) -> None:
    """A folder of the run, or its only checkpoint's, lies elsewhere and is linked to."""
    place = max((run / "checkpoints").iterdir()) if what == "checkpoint" else run / what
    place.rename(outside / place.name)
    place.symlink_to(outside / place.name)


@pytest.mark.parametrize("what", ["checkpoint", "checkpoints", "attempts", "ledger"])
def test_a_linked_folder_is_not_followed(what, tmp_path):
    """By a start, a load, or any command; each error names the link, and what it leads to is as it was."""
    run, outside = trained(tmp_path / "run"), tmp_path / "outside"
    outside.mkdir()
    moved_out(run, outside, what)
    before = contents(outside)

    with pytest.raises(StorageLinked, match=r"symbolic link"), Program().session(run) as session:
        pytest.fail(f"it started at {session.step}")
    if what != "ledger":  # which a load does not need
        with pytest.raises(SpotsafeError, match=r"symbolic link"):
            spotsafe.load(run)
    for name in COMMANDS:
        command(name, run, tmp_path / "out.pt")

    assert contents(outside) == before


def test_garbage_behind_a_link_stays(tmp_path):
    """Files named as ours in a folder elsewhere: `gc --delete` does not reach them."""
    run, outside = trained(tmp_path / "run"), tmp_path / "outside"
    again = Program()
    with again.session(run):
        pass
    folder = "a000001-s000000009-0009-0123abcd"
    victim = outside / folder / "data-00000-000.safetensors"
    victim.parent.mkdir(parents=True)
    victim.write_bytes(b"precious")
    (run / "checkpoints" / folder).symlink_to(victim.parent)
    command("gc", run, tmp_path / "out.pt")
    shutil.move(run / "checkpoints", outside / "all")
    (run / "checkpoints").symlink_to(outside / "all")
    (run / "checkpoints" / folder).unlink()
    shutil.copytree(victim.parent, outside / "all" / folder)

    code, text = command("gc", run, tmp_path / "out.pt")

    assert code == 1
    assert "symbolic link" in text
    assert victim.exists()
    assert (outside / "all" / folder / victim.name).exists()


@pytest.mark.parametrize(
    "call", ["put", "create", "replace", "delete", "read", "size", "list", "names", "begun"]
)
def test_no_call_of_the_store_leaves_the_run(call, tmp_path):
    """Below a linked folder there is nothing, however it is asked for."""
    outside = tmp_path / "outside"
    (outside / "deeper").mkdir(parents=True)
    (outside / "deeper" / "x").write_bytes(b"x")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link").symlink_to(outside)
    store = LocalStore(tmp_path / "run")
    arguments = {"put": (b"y",), "create": (b"y",), "replace": (b"y",)}
    path = "link/deeper" if call in {"list", "names", "begun"} else "link/deeper/x"
    extra = {"max_bytes": 10} if call == "read" else {}
    with pytest.raises(StorageLinked, match=r"run/link is a symbolic link"):
        getattr(store, call)(path, *arguments.get(call, ()), **extra)
    with pytest.raises(StorageLinked):
        store.abort_uploads("link")
    assert contents(outside) == {"deeper/x": b"x"}


@pytest.mark.slow
def test_a_tree_deeper_than_the_stack_is_listed(tmp_path):
    """Folders inside folders cost a look each, no frame."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    folders = [str(tmp_path / "run" / "checkpoints") + "/d" * depth for depth in range(1, 1100)]
    for folder in folders:
        os.mkdir(folder)
    assert open_store(str(tmp_path / "run")).list("checkpoints") == []
    for folder in reversed(folders):  # whoever cleans up may not get so deep
        os.rmdir(folder)


def test_a_linked_run_in_a_folder_of_runs(tmp_path):
    """It is listed where it is; the others are listed all the same."""
    trained(tmp_path / "runs" / "one")
    (tmp_path / "runs" / "two").symlink_to(tmp_path / "runs" / "one")
    code, text = command("ls", tmp_path / "runs", tmp_path / "out.pt")
    assert (code, "one" in text, "two" in text) == (0, True, False)
