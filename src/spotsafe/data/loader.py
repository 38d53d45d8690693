"""`ResumableDataLoader`: torch's DataLoader for map-style datasets, in an order that resumes anywhere."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from spotsafe.data.order import Cursor, OrderSpec, SampleBatch
from spotsafe.data.sampler import ResumableSampler
from spotsafe.data.seeding import SeededDataset
from spotsafe.data.worker import WorkerInit, starting_workers
from spotsafe.errors import LoaderNotResumable


class ResumableDataLoader(DataLoader[Any]):
    """A DataLoader whose order is a pure function of (seed, epoch, dataset length).

    Arguments, batches, `len` and the ends of epochs are those of `torch.utils.data.DataLoader`. What differs:

    - The order does not depend on any random number generator, on the number of workers or on the past. It
      starts at any position at once, without fetching what comes before, in O(1) memory.
    - Each sample is fetched with python's, numpy's and torch's CPU generator seeded for that sample and
      epoch: random augmentation repeats exactly, for any number of workers. The generators of the training
      process are never changed, nor drawn from.
    - Each `iter()` is the next epoch. A dataset with `set_epoch(epoch)` is told the epoch in the process that
      fetches, persistent workers included. `set_epoch` of the loader is never needed.
    - Workers are in process groups of their own, so that a signal to the group of the training process does
      not kill them before it has saved; and they end with it, however it ends.

    Given to `run.steps`, its position counts committed steps. By itself, `state_dict` counts yielded batches.

    Args:
        dataset: map-style, with a length.
        batch_size: samples in a batch, as one loop body sees them; None for samples without collation.
        shuffle: in random order, another one each epoch.
        sampler: not taken; the order is the loader's own.
        batch_sampler: not taken either.
        num_workers: processes that fetch; any number gives the same batches, also after a resume.
        collate_fn: as in DataLoader.
        pin_memory: as in DataLoader.
        drop_last: leave out the short last batch.
        timeout: as in DataLoader, seconds.
        worker_init_fn: as in DataLoader; the worker's process group is set before it is called.
        multiprocessing_context: as in DataLoader.
        generator: not taken; `seed` decides.
        prefetch_factor: as in DataLoader.
        persistent_workers: as in DataLoader.
        pin_memory_device: as in DataLoader.
        in_order: only True; positions are counted in order.
        seed: 0 <= seed < 2**64.
        stream: tells apart loaders that share a seed.

    Raises:
        LoaderNotResumable: an iterable-style dataset, or one without a length.
        ValueError: an argument that contradicts an order of its own; the message says what to use.
    """

    def __init__(  # noqa: PLR0917 - the order of DataLoader's own arguments
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: None = None,
        batch_sampler: None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int = 0,
        stream: int = 0,
    ) -> None:
        _refuse_foreign_order(
            sampler=sampler, batch_sampler=batch_sampler, generator=generator, in_order=in_order
        )
        _refuse_iterable(dataset)
        if batch_size is None and drop_last:
            raise ValueError("batch_size=None disables batching and is mutually exclusive with drop_last")
        super().__init__(
            dataset,
            batch_size,
            sampler=ResumableSampler(dataset, shuffle=bool(shuffle), seed=seed, stream=stream),
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )
        self._order = OrderSpec(
            length=len(dataset),
            batch_size=batch_size or 1,
            shuffle=bool(shuffle),
            seed=seed,
            drop_last=drop_last,
            stream=stream,
        )
        self._cursor = Cursor()
        self._begun = False
        # Weak: in a reference cycle the workers' queues may be torn down before the workers are told to end.
        self._newest: weakref.ref[BatchIterator] | None = None
        self._kept: _Fetcher | None = None

    @property
    def order(self) -> OrderSpec:
        """What the order of samples depends on."""
        return self._order

    # -- a loop of one's own

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override] # torch declares a private iterator class
        """The batches from the loader's position to the end of its epoch."""
        if self._begun:
            self._set(self._order.following(self._cursor))
        newest = self.iter_from(self._cursor, on_yield=self._count)
        self._newest = weakref.ref(newest)
        return newest

    def set_epoch(self, epoch: int) -> None:
        """Let the next `iter()` begin this epoch, as DistributedSampler has it. Never needed.

        A position inside the same epoch, loaded from a state, is kept. In a session this does nothing: the
        run keeps the position.
        """
        if epoch != self._cursor.epoch:
            self._move_to(Cursor(epoch=epoch))

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was yielded, about 100 bytes; it starts no workers."""
        return dict(self._order.state(self._cursor))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a position of `state_dict` with the next `iter()`. An iterator in use ends.

        Raises:
            StateMismatch: it belongs to another dataset length, batch size, seed, shuffle or drop_last.
        """
        self._move_to(self._order.cursor(state_dict))

    def _move_to(self, cursor: Cursor) -> None:
        newest = self._newest() if self._newest is not None else None
        if newest is not None:
            newest.close()
        self._newest = None
        self._set(cursor)

    def _set(self, cursor: Cursor, *, begun: bool = False) -> None:
        """`begun`: batches of the cursor's epoch were yielded since it was set, so the next `iter` leaves it."""
        self._cursor, self._begun = cursor, begun

    def _count(self, iterator: BatchIterator) -> None:
        """A batch is on its way to the user: the position moves behind it. Older iterators do not count."""
        if self._newest is None or self._newest() is not iterator:
            return
        cursor = self._order.advance(self._cursor, batches=1)
        if self._order.ended(cursor):  # the end of an epoch and the start of the next are one position
            self._set(self._order.following(cursor))
        else:
            self._set(cursor, begun=True)

    # -- any position

    def iter_from(
        self, cursor: Cursor, *, on_yield: Callable[[BatchIterator], None] | None = None
    ) -> BatchIterator:
        """The batches from `cursor` to the end of its epoch, whatever the loader's own position is.

        Draws from no global random number generator. Workers start here, if there are any.

        Raises:
            ValueError: the dataset's length has changed since the loader was made.
        """
        length = len(cast("Sized", self.dataset))
        if length != self._order.length:
            raise ValueError(
                f"the dataset's length changed from {self._order.length} to {length}: "
                "make the loader anew after changing the dataset"
            )
        keep = self.persistent_workers and self.num_workers > 0
        fetcher = self._kept or _Fetcher.of(self)
        self._kept = fetcher if keep else None
        return BatchIterator(fetcher.fetch(cursor), keep_workers=keep, on_yield=on_yield)


class BatchIterator(Iterator[Any]):
    """The batches of one pass; `close` ends it and its workers at once."""

    def __init__(
        self,
        batches: Iterator[Any],
        *,
        keep_workers: bool,
        on_yield: Callable[[BatchIterator], None] | None = None,
    ) -> None:
        self._batches: Iterator[Any] | None = batches
        self._keep_workers = keep_workers
        self._on_yield = on_yield
        self._peeked: list[Any] = []

    def __next__(self) -> Any:
        batch = self._peeked.pop() if self._peeked else self._fetch()
        if self._on_yield is not None:
            self._on_yield(self)
        return batch

    def _fetch(self) -> Any:
        if self._batches is None:
            raise StopIteration
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = None
            raise

    def peek(self) -> None:
        """Fetch the next batch now, if there is one; it stays the next."""
        try:
            self._peeked.append(self._fetch())
        except StopIteration:
            return

    def close(self) -> None:
        """Yield nothing more and let the workers go, unless they are persistent."""
        self._peeked.clear()
        batches, self._batches = self._batches, None
        if batches is not None and not self._keep_workers:
            shut_down(batches)


def shut_down(iterator: Iterator[Any]) -> None:
    """End the workers of a DataLoader's iterator now, not when its last reference happens to go."""
    end_workers = getattr(iterator, "_shutdown_workers", None)
    if end_workers is not None:
        end_workers()


# -- the DataLoader inside: fetches micro-batches that the order has already made up


class _Inner(DataLoader[Any]):
    """Does the fetching."""

    def check_worker_number_rationality(self) -> None:
        """The loader that the user made has warned already."""


class _Plan:
    """The sampler of the inner loader: micro-batches from the cursor that is set when `iter` is called."""

    def __init__(self, order: OrderSpec) -> None:
        self.order = order
        self.cursor = Cursor()

    def __iter__(self) -> Iterator[SampleBatch]:
        return self.order.batches(self.cursor)

    def __len__(self) -> int:
        return self.order.batches_per_epoch


@dataclass(frozen=True, slots=True)
class _Fetcher:
    plan: _Plan
    loader: _Inner

    @classmethod
    def of(cls, outer: ResumableDataLoader) -> _Fetcher:
        """A fetcher with the options that `outer` has now: torch allows to set most of them later."""
        batched = outer.batch_size is not None
        plan = _Plan(outer.order)
        loader = _Inner(
            SeededDataset(outer.dataset, collate_fn=outer.collate_fn, batched=batched),
            batch_size=None,
            sampler=plan,
            num_workers=outer.num_workers,
            collate_fn=_as_it_is,
            pin_memory=outer.pin_memory,
            timeout=outer.timeout,
            worker_init_fn=WorkerInit(trainer=os.getpid(), user_fn=outer.worker_init_fn),
            multiprocessing_context=outer.multiprocessing_context,
            generator=torch.Generator(),
            prefetch_factor=outer.prefetch_factor if outer.num_workers > 0 else None,
            persistent_workers=outer.persistent_workers,
            pin_memory_device=outer.pin_memory_device,
        )
        return cls(plan, loader)

    def fetch(self, cursor: Cursor) -> Iterator[Any]:
        self.plan.cursor = cursor
        # Workers start from a seed of their own; only what runs outside of samples can see it.
        self.loader.generator.manual_seed(self.plan.order.worker_seed(cursor.epoch))
        with starting_workers():
            return iter(self.loader)


def _as_it_is(batch: Any) -> Any:
    """Collate function of the inner loader: `SeededDataset` has collated already."""
    return batch


def _refuse_foreign_order(
    *, sampler: object, batch_sampler: object, generator: object, in_order: bool
) -> None:
    if sampler is not None or batch_sampler is not None:
        name = "sampler" if sampler is not None else "batch_sampler"
        raise ValueError(
            f"ResumableDataLoader has an order of its own and takes no {name}=. Use shuffle=True or False "
            "with seed=; for a subset wrap the dataset in torch.utils.data.Subset; for any other keep "
            'torch.utils.data.DataLoader and choose run.steps(loader, resume_data="skip")'
        )
    if generator is not None:
        raise ValueError(
            "ResumableDataLoader takes no generator=: its order is a function of seed=. "
            "Write seed=generator.initial_seed(), or any number"
        )
    if not in_order:
        raise ValueError("ResumableDataLoader counts batches in order and takes no in_order=False")


def _refuse_iterable(dataset: object) -> None:
    if isinstance(dataset, IterableDataset):
        raise LoaderNotResumable(
            f"{type(dataset).__name__} is an IterableDataset: its samples cannot be asked for by index. Use "
            "a map-style dataset (__getitem__ and __len__), or keep its own loader: StatefulDataLoader of "
            'torchdata is resumed as it is, others by run.steps(loader, resume_data="skip") or "fresh"'
        )
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise LoaderNotResumable(
            f"{type(dataset).__name__} lacks __getitem__ or __len__, which a dataset in a known order needs"
        )
