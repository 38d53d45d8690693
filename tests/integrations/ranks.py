"""What each of several processes does in test_dcp_ranks.py: saves and loads its shards over gloo."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from spotsafe.integrations.dcp import SpotsafeReader, SpotsafeWriter

ROWS = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
"""Seven rows do not divide by two."""


def values(mesh: DeviceMesh, *, blank: bool) -> dict[str, Any]:
    """The same global values, in shards; blank ones to load into are sharded in other ways."""
    full = torch.zeros_like(ROWS) if blank else ROWS
    small = full[:1]  # the second rank has nothing of it
    rows, columns = (Shard(1), Shard(0)) if blank else (Shard(0), Shard(1))
    return {
        "model": {
            "rows": distribute_tensor(full.clone(), mesh, [rows]),
            "columns": distribute_tensor(full.clone(), mesh, [columns]),
            "whole": distribute_tensor(full.clone(), mesh, [Replicate()]),
            "few": distribute_tensor(small.clone(), mesh, [Shard(0)]),
            "plain": full.clone().to(torch.bfloat16),
        },
        "epoch": 0 if blank else 5,
        "own": {f"rank {at}": None if blank else (at, "x") for at in range(mesh.size())},
    }


def save(url: str, mesh: DeviceMesh) -> None:
    """Two saves and one in the background, by one writer."""
    writer = SpotsafeWriter(url, max_file_bytes=60)
    for step in (1, 2):
        dcp.save(values(mesh, blank=False), checkpoint_id=f"step-{step}", storage_writer=writer)
    dcp.async_save(values(mesh, blank=False), checkpoint_id="step-3", storage_writer=writer).result()


def load(url: str, mesh: DeviceMesh) -> None:
    """The newest, into shards that lie in another way."""
    found, expected = values(mesh, blank=True), values(mesh, blank=False)
    dcp.load(found, storage_reader=SpotsafeReader(url))
    for name, tensor in expected["model"].items():
        other = found["model"][name]
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in (tensor, other)]
        assert torch.equal(*whole), name
    assert (found["epoch"], found["own"]) == (expected["epoch"], expected["own"])


def main(url: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    save(url, mesh)
    dist.barrier()
    load(url, mesh)
    print(f"rank {os.environ['RANK']} has loaded what was saved")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
