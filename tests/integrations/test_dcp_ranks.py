"""torch.distributed.checkpoint over spotsafe's format, by two real processes over gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import spotsafe
from spotsafe.checkpoint.candidates import look
from spotsafe.checkpoint.catalog import resolve
from spotsafe.checkpoint.verify import verify
from spotsafe.integrations.dcp import SpotsafeReader
from spotsafe.storage.open import open_store
from tests import independent_reader
from tests.integrations.ranks import ROWS

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The run that two ranks saved into and loaded from, started as a launcher would, and what each of them said."""
    folder = tmp_path_factory.mktemp("ranks")
    port, started = free_port(), []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
               "MASTER_PORT": str(port), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}  # fmt: skip
        command = [sys.executable, "-m", "tests.integrations.ranks", str(folder / "run")]
        with open(folder / f"{rank}.log", "wb") as log:
            started.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=110) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    said = [(folder / f"{rank}.log").read_text() for rank in range(2)]
    assert codes == [0, 0], "\n".join(said)
    return folder / "run", said


@pytest.mark.slow
def test_two_ranks_make_one_checkpoint(ranks):
    """One claim, one checkpoint a save, with an index of each rank; whole, verified, and read by everybody."""
    run, _ = ranks
    store = open_store(str(run))
    names = look(store).names

    assert [(name.attempt, name.step, name.save) for name in names] == [(1, 3, 3), (1, 2, 2), (1, 1, 1)]
    for name in names:
        assert verify(store, name) == []
    manifest = resolve(store).manifest
    assert manifest is not None
    assert (manifest.world_size, [part.rank for part in manifest.parts]) == (2, [0, 1])
    held = spotsafe.load(run)
    for name in ("rows", "columns", "whole"):
        assert torch.equal(held[f"model.{name}"], ROWS), name
    assert torch.equal(held["model.few"], ROWS[:1])
    assert held["model.plain"].dtype is torch.bfloat16
    assert (held["epoch"], held["own['rank 1']"]) == (
        5,
        (1, "x"),
    )
    found = independent_reader.read_newest(run)
    assert found.tensors["model.rows"].tolist() == ROWS.tolist()


@pytest.mark.slow
def test_two_ranks_load_what_was_sharded_in_another_way(ranks):
    """Each has compared every tensor and value; rows that were cut are loaded as columns and the other way round."""
    _, said = ranks

    assert [f"rank {rank} has loaded what was saved" in said[rank] for rank in range(2)] == [True, True]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_loads_what_two_saved(ranks):
    """Any number of processes can."""
    run, _ = ranks
    values = {"model": {"rows": torch.zeros(7, 6), "few": torch.zeros(1, 6)}, "epoch": 0}

    dcp.load(values, storage_reader=SpotsafeReader(f"{run}@2"), no_dist=True)

    assert torch.equal(values["model"]["rows"], ROWS)
    assert values["epoch"] == 5
