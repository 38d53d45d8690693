"""One view of every kind of loader for the loops: where it stands, counted in committed micro-batches.

`feed_for` chooses the kind:

- ours, by `ResumableDataLoader` or `ResumableSampler`: the position is a number, a resume starts right there;
- a loader with `state_dict` and `load_state_dict`: taken as it is;
- any other: a plain map-style DataLoader only with a choice of `resume_data`, a plain iterable with a
  warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, cast

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from spotsafe.data.feed_order import OrderFeed
from spotsafe.data.feed_recreated import RecreatedFeed
from spotsafe.data.feed_stateful import StatefulFeed
from spotsafe.data.loader import ResumableDataLoader
from spotsafe.data.sampler import ResumableSampler
from spotsafe.errors import LoaderNotResumable

RESUME_DATA = ("skip", "epoch", "fresh")
"""What may be asked for where a position cannot be kept exactly (see `feed_for`)."""


class Feed(Protocol):
    """A loader with a position that moves when work is committed, not when a batch is fetched."""

    def start(self) -> Iterator[Any]:
        """An iterator from the committed position to the end of the epoch.

        It may start workers, and for foreign loaders it may draw from the global random number generators. It
        may have a `close` that ends it and its workers.
        """
        ...

    def committed(self, batches: int) -> None:
        """So many more micro-batches have been trained on."""
        ...

    @property
    def ended(self) -> bool | None:
        """Whether the committed position is the end of the epoch; None if only the iterator knows."""
        ...

    def remaining(self) -> int | None:
        """Micro-batches from the committed position to the end of the epoch; None if unknown."""
        ...

    def finish_epoch(self) -> None:
        """Move to the start of the next epoch."""
        ...

    @property
    def epoch(self) -> int:
        """The epoch of the committed position, 0-based."""
        ...

    def state(self) -> Any:
        """The committed position as plain values."""
        ...

    def load(self, state: Any) -> None:
        """Move to a position of `state`. Before `start`.

        Raises:
            StateMismatch: it belongs to other data, to another order, or to another kind of loader.
        """
        ...

    def place_of(self, state: Any) -> tuple[int, int] | None:
        """Epoch and samples of a saved position, if it surely belongs to the same data; else None."""
        ...


def feed_for(loader: Iterable[Any], *, resume_data: str | None, warn: Callable[[str], None]) -> Feed:
    """The feed for a loader.

    Args:
        loader: what the user gave to `run.steps`.
        resume_data: what a resume may do where the position cannot be kept exactly. "skip" makes the order
            again from the random number generators as they were and fetches and drops what was done;
            "epoch" repeats the epoch from its start; "fresh" takes a new iterator and promises nothing.
        warn: called with one line for a person.

    Raises:
        ValueError: an unknown `resume_data`.
        TypeError: `loader` is not iterable.
        LoaderNotResumable: a plain map-style DataLoader without a choice; the message shows what to write.
    """
    if resume_data is not None and resume_data not in RESUME_DATA:
        raise ValueError(f'resume_data must be "skip", "epoch" or "fresh", not {resume_data!r}')
    if isinstance(loader, ResumableDataLoader):
        return OrderFeed(loader.order, loader.iter_from, resume_data=resume_data, warn=warn)
    if isinstance(loader, DataLoader) and isinstance(loader.sampler, ResumableSampler):
        return OrderFeed.of_sampler(loader, loader.sampler, resume_data=resume_data, warn=warn)
    if not hasattr(loader, "__iter__"):
        raise TypeError(f"run.steps takes an iterable of batches, not a {type(loader).__name__}")
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return StatefulFeed(loader, resume_data=resume_data, warn=warn)
    if resume_data is None:
        if _is_map_style(loader):
            raise LoaderNotResumable(_what_to_write(cast("DataLoader[Any]", loader)))
        warn(_no_promise(loader))
    return RecreatedFeed(loader, mode=resume_data or "fresh", sized=_is_map_style(loader), warn=warn)


def _is_map_style(loader: object) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _no_promise(loader: object) -> str:
    return (
        f"the position in a {type(loader).__name__} cannot be kept: after a resume it starts again, and "
        'samples repeat. Give run.steps a ResumableDataLoader, or say resume_data="skip" (fetch again and '
        'drop what was done: exact if it yields the same each time) or "fresh" (silences this)'
    )


def _what_to_write(loader: DataLoader[Any]) -> str:
    order = _as_shuffle(loader)
    if order is None:
        custom = loader.sampler if loader.batch_size is not None else loader.batch_sampler
        ours = (
            f"Its {type(custom).__name__} has no counterpart in spotsafe.ResumableDataLoader; if you can do "
            f"without it, write\n\n    loader = {_our_line(loader, shuffle=True)}\n\n"
        )
    else:
        ours = f"Write\n\n    loader = {_our_line(loader, shuffle=order)}\n\n"
    return (
        f"the position in this {type(loader).__name__} cannot be kept exactly: its order comes from random "
        f"numbers that are gone after a restart. {ours}or say what a resume may do: "
        'run.steps(loader, resume_data="skip") makes the same order again and fetches and drops what was '
        'done, "epoch" repeats the epoch from its start, "fresh" promises nothing'
    )


def _as_shuffle(loader: DataLoader[Any]) -> bool | None:
    """Which `shuffle=` means the loader's sampler; None for a sampler of another kind."""
    sampler = loader.sampler
    if loader.batch_size is None and loader.batch_sampler is not None:
        return None
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    if type(sampler) is RandomSampler and not sampler.replacement:
        return True
    return False if type(sampler) is SequentialSampler else None


def _our_line(loader: DataLoader[Any], *, shuffle: bool) -> str:
    """The call of our loader that means the same."""
    arguments = ["dataset", f"batch_size={_batch_size(loader)}", f"shuffle={shuffle}", "seed=0"]
    arguments += [
        f"{name}={_shown(getattr(loader, name))}"
        for name, default in (
            ("num_workers", 0),
            ("collate_fn", default_collate),
            ("pin_memory", False),
            ("drop_last", False),
            ("timeout", 0),
            ("worker_init_fn", None),
            ("prefetch_factor", 2 if loader.num_workers else None),
            ("persistent_workers", False),
        )
        if getattr(loader, name) != default and not (name == "collate_fn" and loader.batch_size is None)
    ]
    return f"spotsafe.ResumableDataLoader({', '.join(arguments)})"


def _batch_size(loader: DataLoader[Any]) -> int | None:
    return (
        getattr(loader.batch_sampler, "batch_size", None) if loader.batch_size is None else loader.batch_size
    )


def _shown(value: object) -> str:
    return str(getattr(value, "__name__", None) or value)
