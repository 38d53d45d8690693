"""The reading half of `spotsafe.integrations.dcp`. Its metadata is made of the index; there is no pickle."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from spotsafe.checkpoint.catalog import split_target
from spotsafe.checkpoint.index import Slice, TensorEntry
from spotsafe.checkpoint.naming import is_tensor, reading_trees
from spotsafe.errors import CheckpointNotFound, StateMismatch, StorageNotFound
from spotsafe.exchange.dcp_names import Path, flatten
from spotsafe.integrations.dcp_writer import step_of
from spotsafe.loading import Opened, decode, read_slices, with_checkpoint
from spotsafe.storage.store import Store
from spotsafe.tensors.tree import Json, as_bytes, torch_dtype


class SpotsafeReader(StorageReader):
    """A `StorageReader` of spotsafe checkpoints, whoever wrote them.

    Every byte that is loaded is verified before the first tensor changes, and each rank reads only the blocks that
    hold its part.

    Args:
        url: the run, with ``@latest`` (the default), ``@best``, ``@<step>`` or ``@<a checkpoint's name>`` behind it.
            A `checkpoint_id` that ends in a number asks for that step instead.
    """

    def __init__(self, url: str | os.PathLike[str] | Store) -> None:
        self.checkpoint_id: str | os.PathLike[str] | None = None
        self._step_of_id: int | None = None
        self._url = url
        self._opened: Opened | None = None
        self._values: Mapping[str, tuple[Path, Json]] = {}

    # -- what torch.distributed.checkpoint calls, in this order ---

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A load begins; a number at the end of its id is the step."""
        self.checkpoint_id, self._opened, self._values = checkpoint_id, None, {}
        self._step_of_id = None if checkpoint_id is None else step_of(checkpoint_id)

    # Not `*args, **kwargs`: by the latter's name DCP finds readers of checkpoints that each rank has for itself.
    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """Choose the checkpoint and describe it.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
            DamagedCheckpoint: it is not what was published.
            StorageError: it could not be read.
        """
        opened = with_checkpoint(self._target(), lambda found: found)
        state = {name: tree for index in opened.indexes for name, tree in index.state.items()}
        with reading_trees(opened.name):
            self._values = flatten(state) or _bare(opened)
        self._opened = opened
        entries = opened.tensors()
        return Metadata(
            state_dict_metadata={
                fqn: _tensor_metadata(entries[node["name"]]) if is_tensor(node) else BytesStorageMetadata()
                for fqn, (_, node) in self._values.items()
            },
            planner_data={fqn: path for fqn, (path, _) in self._values.items()},
            storage_data=opened.name,
            storage_meta=StorageMeta(checkpoint_id=opened.name),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_options: Any
    ) -> None:
        """Nothing more to find out."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Tell the coordinator which checkpoint this rank has found."""
        plan.storage_data = self._found().name
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See that all ranks have found the same one.

        Raises:
            StateMismatch: a checkpoint was published between their looks.
        """
        names = sorted({str(plan.storage_data) for plan in plans})
        if len(names) > 1:
            raise StateMismatch(
                f"the ranks found different checkpoints ({', '.join(names)}), for one was published meanwhile; "
                "name one behind @, or load again"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify everything, then hand it over.

        Raises:
            DamagedCheckpoint: bytes differ from what was published; nothing was loaded.
            CheckpointNotFound: the checkpoint was deleted while it was read.
            StorageError: it could not be read.
        """
        opened = self._found()
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        others = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        try:
            pieces = self._pieces(opened, tensors)
            nodes = {item.storage_index.fqn: self._values[item.storage_index.fqn][1] for item in others}
            values = decode(opened, nodes)
        except StorageNotFound as error:
            raise CheckpointNotFound(f"{opened.name} was deleted while it was read ({error})") from error
        for item in tensors:
            _hand_over(item, pieces.get(_key(item)), planner)
        for item in others:
            planner.load_bytes(item, _as_planners_expect(values[item.storage_index.fqn]))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any text may be an id."""
        return isinstance(checkpoint_id, (str, os.PathLike))

    # -- inside ---

    def _target(self) -> str | os.PathLike[str] | Store:
        step, self._step_of_id = (
            self._step_of_id,
            None,
        )  # DCP says nothing to a reader whose next load has no id
        if step is None:
            return self._url
        if isinstance(self._url, Store):
            raise TypeError("a Store has no place for a step; give a url")
        return f"{split_target(os.fspath(self._url))[0]}@{step}"

    def _found(self) -> Opened:
        assert self._opened is not None, "the metadata is read first"
        return self._opened

    def _pieces(self, opened: Opened, items: Sequence[ReadItem]) -> dict[Any, torch.Tensor]:
        """The slices that the items need, each read once."""
        entries = opened.tensors()
        wanted: dict[Any, tuple[TensorEntry, Slice]] = {}
        for item in items:
            name = self._values[item.storage_index.fqn][1]["name"]
            for entry in entries[name]:
                for piece in entry.slices:
                    if piece.offsets == tuple(item.storage_index.offset or ()):
                        wanted[_key(item)] = entry, piece
        return dict(zip(wanted, read_slices(opened, list(wanted.values())), strict=True))


def _bare(opened: Opened) -> dict[str, tuple[Path, Json]]:
    """A checkpoint without state has its tensors."""
    return {name: ((name,), node) for name, node in opened.contents.values.items() if is_tensor(node)}


def _key(item: ReadItem) -> tuple[str, tuple[int, ...]]:
    return item.storage_index.fqn, tuple(item.storage_index.offset or ())


def _tensor_metadata(entries: Sequence[TensorEntry]) -> TensorStorageMetadata:
    first = entries[0]
    boxes = [(piece.offsets, piece.lengths) for entry in entries for piece in entry.slices]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=torch_dtype(first.dtype)),
        size=torch.Size(first.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(lengths))
            for offsets, lengths in boxes or [((0,) * len(first.shape), first.shape)]
        ],
    )


def _hand_over(item: ReadItem, piece: torch.Tensor | None, planner: LoadPlanner) -> None:
    target = planner.resolve_tensor(item).detach()
    if piece is not None:
        for axis, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            piece = piece.narrow(axis, offset, length)
        if piece.shape != target.shape:
            raise StateMismatch(
                f"{item.storage_index.fqn}: {list(target.shape)} is asked for where {list(piece.shape)} is"
            )
        _copy(piece, target)
    planner.commit_tensor(item, target)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """As bytes where that is possible: torch has no copy kernel for some dtypes."""
    if source.dtype == target.dtype and target.is_cpu and target.is_contiguous() and source.is_contiguous():
        as_bytes(target).copy_(as_bytes(source))
    else:
        target.copy_(source)


def _as_planners_expect(value: Any) -> io.BytesIO:
    """Planners unpickle values; this pickle is of our own making, in memory, of a value that is decoded already."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer
