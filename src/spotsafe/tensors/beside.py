"""A copy into the arena that runs beside training, and the proof that nobody wrote meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from spotsafe.tensors.memory import copy_bytes
from spotsafe.tensors.plan import Placement, SavePlan
from spotsafe.tensors.staging import box_of, memory_of
from spotsafe.tensors.tree import PLAIN, Capture, NamedTensor
from spotsafe.tensors.versions import version_of

LEAST_BYTES = 64 << 10
"""Tensors from this size on are worth it: a smaller one is copied faster than it is remembered."""
_CHUNK = 8 << 20
"""Bytes of one call that nobody can interrupt."""
_SAMPLE = 64
"""Bytes at the beginning, the middle and the end of a tensor that are remembered from the safe point."""
_ALL = 3 * _SAMPLE
NAME = "spotsafe-copy"
_LOOK_EVERY_S = 0.002

# Unlike `PyDLL`, these let the interpreter's lock go while they work: training goes on.
_libc = ctypes.CDLL(None)
_copy, _compare = _libc.memmove, _libc.memcmp
for _call in (_copy, _compare):
    _call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy.restype, _compare.restype = ctypes.c_void_p, ctypes.c_int


class _Move(NamedTuple):
    """Bytes of a tensor and their place in the arena."""

    tensor: int
    """Position in the capture's tensors."""
    source: int
    target: int
    nbytes: int


class Watched:
    """Some tensors of a save, from the safe point on: were they written, and are they still what the arena has?

    It holds the memory that they have now, whatever the program puts in its place.

    Args:
        plan: of the whole save.
        capture: what the plan was made of.
        arena: where the save lies.
        chosen: positions in the capture's tensors; `can_be_beside` holds of them.
    """

    def __init__(self, plan: SavePlan, capture: Capture, arena: memoryview, chosen: Collection[int]) -> None:
        # An alias keeps the memory, and counts the writes to it, when the program gives the tensor other memory.
        self._held = {at: capture.tensors[at].tensor.detach() for at in chosen}
        self._marks = {at: _mark(alias) for at, alias in self._held.items()}
        self._names = {at: capture.tensors[at].name for at in chosen}
        self._arena = memory_of(arena, plan.arena_size)
        base, held = self._arena.data_ptr(), self._held
        self._moves = [self._move(place, base) for place in plan.placements if place.tensor in held]

    def wait(self) -> None:
        """Return when nothing is being copied."""

    def call_off(self) -> None:
        """The same, as soon as can be: nobody will use what is copied."""

    def moved(self) -> list[str]:
        """Names of the tensors that were written meanwhile, as far as torch counts writes, or whose memory is gone."""
        return [self._names[at] for at, alias in self._held.items() if _mark(alias) != self._marks[at]]

    def differing(self) -> list[str]:
        """Names of the tensors that are seen to be other than at the start, counted by torch or not.

        Here: whose bytes are not those of the arena, of those that are where they were.
        """
        return [
            self._names[move.tensor]
            for move in self._moves
            if self._is_there(move.tensor) and any(_compare(*chunk) for chunk in _chunks(move))
        ]

    def _is_there(self, at: int) -> bool:
        """False if the storage itself let its memory go (`share_memory_`, `resize_`): nobody may read that any more."""
        return self._held[at].data_ptr() == self._marks[at][1]

    def _move(self, place: Placement, base: int) -> _Move:
        tensor, lengths = self._held[place.tensor], place.lengths
        if tensor.shape == lengths:
            source = self._marks[place.tensor][1]
        else:
            box = box_of(tensor, place)
            assert box.is_contiguous(), "a plan cuts along the first dimension that is longer than 1"
            source = box.data_ptr()
        return _Move(place.tensor, source, base + place.arena_offset, place.nbytes)


class BesideCopy(Watched):
    """Copies them in a thread of its own, which changes nothing of torch's. Arguments as of `Watched`.

    What else that thread can do for the save, `ahead` does.

    Until `wait` has returned and nobody `moved`, the arena holds no state: the program may write at any time.

    There is no lock in it, and it does not matter where in `start` Ctrl-C comes: whether there is a thread then, nobody
    knows, but not what it does.
    """

    def __init__(
        self,
        plan: SavePlan,
        capture: Capture,
        arena: memoryview,
        chosen: Collection[int],
        *,
        ahead: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(plan, capture, arena, chosen)
        self._ahead = ahead
        self._samples = _samples([(move.source, move.nbytes) for move in self._moves])
        self._differing = list(self._names.values())  # nothing is there yet
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._to_do = [self._moves]  # the thread takes it out, unless it is called off before
        self._at_work = False

    def start(self) -> None:
        """Begin to copy.

        Raises:
            RuntimeError: there is no thread to be had.
        """
        self._thread.start()

    def wait(self) -> None:
        """Return when everything is copied; after `start`."""
        while self._to_do or self._at_work or self._thread.is_alive():
            if self._thread.is_alive():
                self._thread.join()
            else:  # it is about to begin
                time.sleep(_LOOK_EVERY_S)

    def call_off(self) -> None:
        """Return when nothing is being copied, nor ever will be; at any time."""
        self._to_do.clear()
        self.wait()

    def differing(self) -> list[str]:
        """The same, of what was other already when it was copied; to be asked after `wait`.

        Whatever writes all of a tensor is found so, counted by torch or not: an average that is swapped in now and
        then through ``.data``. What writes a few elements is for a probe to find.
        """
        return self._differing

    def _run(self) -> None:
        self._at_work = True  # before it looks for work: whoever calls it off looks here afterwards
        try:
            self._copy(self._to_do.pop())
        except IndexError:  # it was called off
            return
        finally:
            self._at_work = False

    def _copy(self, moves: Sequence[_Move]) -> None:
        differing = []
        for at, move in enumerate(moves):
            for source, target, nbytes in _chunks(move):
                if not self._is_there(move.tensor):
                    break
                _copy(target, source, nbytes)
            if _samples([(move.target, move.nbytes)]) != self._samples[at * _ALL : (at + 1) * _ALL]:
                differing.append(self._names[move.tensor])
        self._differing = differing
        with contextlib.suppress(Exception):  # it is done again where it is needed
            self._ahead()


def can_be_beside(one: NamedTensor) -> bool:
    """Whether a tensor is plain memory of this machine, large enough, and torch counts the writes to it."""
    tensor = one.tensor
    return (
        type(tensor) in PLAIN
        and tensor.is_cpu
        and tensor.numel() * tensor.element_size() >= LEAST_BYTES
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_inference()
    )


def _mark(alias: torch.Tensor) -> tuple[int, int]:
    return version_of(alias), alias.data_ptr()


def _samples(places: Sequence[tuple[int, int]]) -> bytes:
    """Of each place, its address and its bytes: `_ALL` bytes, which are the same only if the samples are."""
    found = bytearray(len(places) * _ALL)
    to = ctypes.addressof(ctypes.c_char.from_buffer(found)) if found else 0
    for address, nbytes in places:
        size = min(_SAMPLE, nbytes)
        copy_bytes(to, address, size)
        copy_bytes(to + _SAMPLE, address + (nbytes - size) // 2, size)
        copy_bytes(to + 2 * _SAMPLE, address + nbytes - size, size)
        to += _ALL
    return bytes(found)


def _chunks(move: _Move) -> Iterator[tuple[int, int, int]]:
    for start in range(0, move.nbytes, _CHUNK):
        yield move.source + start, move.target + start, min(_CHUNK, move.nbytes - start)
