"""What the commands say of checkpoints that refer to files of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

from spotsafe.checkpoint.layout import CheckpointName, frozen_file
from spotsafe.checkpoint.verify import Good, verify
from spotsafe.policy.retention import latest
from spotsafe.storage.local import LocalStore
from spotsafe.testing.faults import CountingStore
from spotsafe.testing.saves import Attempt

Call = Callable[..., Result]
FROZEN = [{"base": np.ones((64, 8), dtype=np.float32)}]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[LocalStore, list[CheckpointName]]:
    """Three checkpoints, of which the first owns a file that the others refer to."""
    store = LocalStore(tmp_path)
    attempt = Attempt(store, keep=latest(9))
    return store, [attempt.save(step, frozen=FROZEN).name for step in (1, 2, 3)]


def test_show_says_what_it_refers_to(saved: tuple[LocalStore, list[CheckpointName]], call: Call) -> None:
    """The size is that of everything a reader needs; the tensors are listed wherever they lie."""
    store, (owner, _, newest) = saved
    first = json.loads(call("show", f"{store.url}@1", "--json").stdout)
    found = json.loads(call("show", store.url, "--json").stdout)
    assert found["name"] == str(newest)
    assert found["data_bytes"] == first["data_bytes"]
    assert (first["referred_bytes"], found["referred_bytes"]) == (
        0,
        store.size(owner.file(frozen_file(0, 0))),
    )
    assert found["references"] == [f"{owner}/{frozen_file(0, 0)}"]
    assert first["references"] == []
    assert "base" in [tensor["name"] for tensor in found["tensors"]]
    assert f"refers to: 1 file of {owner}" in call("show", store.url).stdout
    assert "refers to" not in call("show", f"{store.url}@1").stdout


def test_ls_and_verify_follow_references(saved: tuple[LocalStore, list[CheckpointName]], call: Call) -> None:
    """A missing or changed file is a fault of every checkpoint that needs it, named with its owner."""
    store, (owner, *others) = saved
    assert call("verify", store.url).exit_code == 0
    path = Path(store.url, owner.file(frozen_file(0, 0)))
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    result = call("verify", store.url, "--json")
    assert result.exit_code == 1
    faults = {
        one["name"]: [fault["file"] for fault in one["faults"]]
        for one in json.loads(result.stdout)["checkpoints"]
    }
    assert faults[str(owner)] == [frozen_file(0, 0)]
    assert all(faults[str(name)] == [f"{owner}/{frozen_file(0, 0)}"] for name in others)
    path.unlink()
    rows = json.loads(call("ls", store.url, "--json").stdout)["checkpoints"]
    assert [row["usable"] for row in rows] == [False] * 3
    assert f"{frozen_file(0, 0)} of {owner}, which it refers to, is missing" in rows[0]["problem"]


def test_a_file_of_several_checkpoints_is_read_once(tmp_path: Path) -> None:
    """Frozen weights may be the whole of a run: verifying ten checkpoints must not read them ten times."""
    store = LocalStore(tmp_path)
    attempt = Attempt(store, keep=latest(9))
    frozen = [{"base": np.zeros(9 << 20, dtype=np.float32)}]  # three blocks
    names = [attempt.save(step, frozen=frozen).name for step in (1, 2, 3)]
    counting, good = CountingStore(store), Good()

    for name in names:
        assert verify(counting, name, good=good) == []

    path = names[0].file(frozen_file(0, 0))
    reads = [one for one in counting.operations if one.name == "read_into" and one.path == path]
    assert len(reads) == 3, "all blocks once; what the header lists is remembered"
