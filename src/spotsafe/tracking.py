"""What a session tracks: objects by name, captured together, compared with a checkpoint, restored in place."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from spotsafe.checkpoint.strict_json import is_text
from spotsafe.errors import StateMismatch, UnsupportedState, UntrackedParameters
from spotsafe.tensors import kinds
from spotsafe.tensors.context import Capturing, Known, NothingKnown, Restoring
from spotsafe.tensors.frozen import address_of, frozen_names
from spotsafe.tensors.giving import Giving
from spotsafe.tensors.kept import KeptState
from spotsafe.tensors.kept_capture import KeptCapture
from spotsafe.tensors.marks import PlainMark, PlainWatch
from spotsafe.tensors.optimizers import is_optimizer, parameters_of, restore_group_options
from spotsafe.tensors.owners import Names, find_names, track_line
from spotsafe.tensors.pause import collection_paused
from spotsafe.tensors.source import Source
from spotsafe.tensors.tree import Capture, Collector, Json, SavedState, Spec, as_bytes, spec_of
from spotsafe.tensors.versions import BuffersMark, VersionWatch, not_finite

_SHOWN = 20


class Tracker:
    """The tracked objects of one session.

    Args:
        strict: whether names that only one side has are an error; otherwise they are left as they are and
        listed in
            `skipped`. Shapes must agree either way.
        options: names that mean options of the session, for the hint in an error.
        warn: takes one line for people.
    """

    def __init__(
        self, *, strict: bool = True, options: Collection[str] = (), warn: Callable[[str], None]
    ) -> None:
        self._strict, self._options, self._warn = strict, frozenset(options), warn
        self._objects: dict[str, Any] = {}
        self._saved: SavedState | None = None
        self._saved_specs: Mapping[str, Spec] = {}
        self._giving: Giving | None = None
        self._restored: set[str] = set()
        self._loaded: set[str] = set()
        self._arrived = False
        self._as_restored: dict[str, BuffersMark] = {}
        self._new: set[str] = set()
        self._warned: set[str] = set()
        self._watch = VersionWatch()
        self._plain_watch = PlainWatch()
        self._last = KeptCapture()
        self.skipped: list[str] = []

    # -- what is tracked ---------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which objects are tracked."""
        return tuple(self._objects)

    @property
    def as_made(self) -> frozenset[str]:
        """Names of the objects that hold what the program made them with, or trained since; nothing was loaded."""
        return frozenset(self._objects) - self._loaded

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Every tracked optimizer of torch's class, also inside dicts and lists."""
        return tuple(part for _, part in self._parts() if isinstance(part, torch.optim.Optimizer))

    @property
    def optimizers_without_hooks(self) -> tuple[Any, ...]:
        """Those that are only shaped like torch's, so that nobody is told before they step."""
        parts = [part for _, part in self._parts() if is_optimizer(part)]
        return tuple(part for part in parts if not isinstance(part, torch.optim.Optimizer))

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Every tracked module, also inside dicts and lists."""
        return tuple(part for _, part in self._parts() if isinstance(part, nn.Module))

    def add(self, name: str, obj: Any, *, from_state: bool = False) -> None:
        """Track an object; if a checkpoint was restored that holds it, restore it at once.

        Args:
            name: its name in the checkpoint.
            obj: the object.
            from_state: it came in ``state={...}``, where names of options are allowed.

        Raises:
            UnsupportedState: it is no state (a TypeError); names the nearest option.
            ValueError: the name is taken, reserved or no name, or the object is tracked already.
            StateMismatch: it does not fit what the checkpoint holds of it.
        """
        self._check_name(name, from_state=from_state)
        self._check_kind(name, obj)
        for other, known in self._objects.items():
            if known is obj:
                raise ValueError(f"{name} is tracked already, as {other}")
        self._objects[name] = obj
        self._watch.forget()
        self._plain_watch.forget()
        if self._saved is not None:
            if self._arrived and name not in self._saved.state:
                self._new.add(name)
                self._warn(f"{name} is not in the checkpoint, which is of before; it starts as it was made")
            try:
                self._restore_late(name)
            except BaseException:  # whoever corrects the object may track it again
                del self._objects[name]
                self._restored.discard(name)
                self._loaded.discard(name)
                raise

    def _check_name(self, name: str, *, from_state: bool) -> None:
        if type(name) is not str or not name or not is_text(name):
            raise ValueError(f"state needs a name, not {name!r}")
        if name in self._objects:
            raise ValueError(f"{name} is tracked already; choose another name")
        if name in self._options and not from_state:
            raise ValueError(
                f"{name} is an option of the session; to track state of that name use state={{...}}"
            )

    def _check_kind(self, name: str, obj: Any) -> None:
        try:
            kinds.kind_of(obj, name)
        except UnsupportedState as error:
            near = difflib.get_close_matches(name, sorted(self._options), n=1)
            if not near or name in self._options:
                raise
            raise UnsupportedState(
                f"{name} is no state; did you mean {near[0]}=? ({error})", path=name
            ) from error

    def _parts(self) -> Iterator[tuple[str, Any]]:
        for name, obj in self._objects.items():
            yield from kinds.parts(obj, name)

    # -- capture -----------------------------------------------------------------------------------------------

    def capture(self, *, session: Mapping[str, object] | None = None) -> Capture:
        """The state of everything tracked, with live tensors; and the session's own values.

        Raises:
            UntrackedParameters: an optimizer holds a parameter that no tracked object owns.
            UnsupportedState: something cannot be saved; the message names its path.
        """
        self._watch.forget()
        self._plain_watch.forget()
        with collection_paused():
            self._last.begin()
            names = self._last.names(self._parts(), self._names)
            self._refuse_unowned(names)
            captured = self._capture(names, session, self._objects, known=self._last)
            captured = replace(captured, tensors=self._last.end(captured.tensors))
            return replace(captured, frozen=self._frozen_in(captured, names))

    def encode(self, values: Mapping[str, object]) -> Json:
        """The session's own values in a form of their own, to be compared with that of another moment.

        Raises:
            UnsupportedState: something in it cannot be saved.
        """
        collector = Collector()
        tree = collector.session(values)
        copies = (one.tensor.detach().cpu().resolve_conj().resolve_neg() for one in collector.tensors)
        return [tree, [as_bytes(copy.contiguous()).numpy().tobytes() for copy in copies]]

    def _capture(
        self,
        names: Names,
        session: Mapping[str, object] | None,
        objects: Mapping[str, Any],
        known: Known | None = None,
    ) -> Capture:
        collector = Collector()
        capturing = Capturing(
            collector=collector, names=names.of, warn=self._warn_once, known=known or NothingKnown()
        )
        # Optimizers last: a tensor that is also elsewhere is called after its owner.
        order = sorted(objects, key=lambda name: is_optimizer(objects[name]))
        state = {name: kinds.capture(objects[name], name, capturing) for name in order}
        values = None if session is None else collector.session(session)
        return Capture(
            state={name: state[name] for name in objects}, tensors=collector.tensors, session=values
        )

    def _frozen_in(self, captured: Capture, names: Names) -> frozenset[str]:
        parts = list(self._parts())
        trained = [one for _, part in parts if is_optimizer(part) for one in parameters_of(part)]
        return frozen_names(
            captured.tensors,
            modules=[path for path, part in parts if isinstance(part, nn.Module)],
            trained={address_of(one): names.of[id(one)] for one in trained},
        )

    def nonfinite(self, only: Collection[str] | None = None) -> frozenset[str]:
        """Names of the trainable parameters and moments that hold a NaN or an infinity now.

        Args:
            only: the tracked names to look at; None looks at all.
        """
        names = self._names()
        whole = {
            name: obj
            for name, obj in self._objects.items()
            if (only is None or name in only) and not self._unowned_in(name, names)
        }
        return not_finite(self._capture(names, None, whole).tensors)

    def buffers_mark(self) -> BuffersMark:
        """A cheap mark of the tensors in tracked modules and of tracked tensors.

        Two marks are equal unless one of these tensors was written in place or replaced in between. Writes
        through ``.data`` and by fused optimizers do not show.
        """
        return self._watch.mark(part for _, part in self._parts())

    def buffers_moved(self, mark: BuffersMark) -> bool:
        """Whether one of these tensors changed, or was replaced, since `mark`."""
        self._watch.forget()
        self._plain_watch.forget()
        return self.buffers_mark() != mark

    def plain_mark(self, values: Mapping[str, Any]) -> PlainMark:
        """A cheap mark of all other tracked state, and of the user's values; see `spotsafe.tensors.marks`."""
        return self._plain_watch.mark((part for _, part in self._parts()), values)

    def keep(self, values: dict[str, Any]) -> KeptState:
        """Copies of that state, to be put back for a save of this instant."""
        return KeptState([part for _, part in self._parts()], values)

    # -- owners of parameters ----------------------------------------------------------------------------------

    def holds_parameters_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether any parameter of an optimizer belongs to a tracked object."""
        names = self._names()
        return any(id(parameter) in names.of for parameter in parameters_of(optimizer))

    def without_schedulers(self) -> list[str]:
        """Types of tracked optimizers whose learning rate somebody schedules who is not tracked."""
        parts = [part for _, part in self._parts()]
        scheduled = {id(getattr(part, "optimizer", None)) for part in parts if isinstance(part, LRScheduler)}
        return [
            type(part).__name__
            for part in parts
            if isinstance(part, torch.optim.Optimizer)
            and id(part) not in scheduled
            and any("initial_lr" in group for group in part.param_groups)
        ]

    def unowned(self) -> list[tuple[str, torch.Tensor]]:
        """Parameters of tracked optimizers that no tracked object owns: path of the optimizer, parameter."""
        names = self._names()
        return [item for name in self._objects for item in self._unowned_in(name, names)]

    def _names(self) -> Names:
        return find_names(self._objects)

    def _unowned_in(self, name: str, names: Names) -> list[tuple[str, torch.Tensor]]:
        return [
            (at, parameter)
            for at, part in kinds.parts(self._objects[name], name)
            if is_optimizer(part)
            for parameter in parameters_of(part)
            if id(parameter) not in names.of
        ]

    def _refuse_unowned(self, names: Names) -> None:
        lost = [item for name in self._objects for item in self._unowned_in(name, names)]
        if lost:
            raise UntrackedParameters(track_line(lost, taken=self._objects))

    # -- restore -----------------------------------------------------------------------------------------------

    def check(self, *, tensors: Mapping[str, Spec], state: Mapping[str, Json]) -> list[str]:
        """Everything in which a checkpoint does not fit the objects tracked now; changes nothing.

        Args:
            tensors: dtype (as torch names it, without ``torch.``) and shape of every saved tensor.
            state: `Index.state`.

        Returns:
            One line for each mismatch: name, what was saved, what the program has. An optimizer of which a
            parameter has no owner yet is left out.
        """
        names = self._names()
        return [problem for name in self._objects for problem in self._problems(name, names, tensors, state)]

    def _problems(
        self, name: str, names: Names, specs: Mapping[str, Spec], state: Mapping[str, Json]
    ) -> list[str]:
        if name not in state:
            known = ", ".join(list(state)[:_SHOWN]) or "nothing"
            missing = f"{name}: tracked, but not in the checkpoint, which holds {known}; strict=False starts it afresh"
            return [missing] if self._strict and name not in self._new else []
        if self._unowned_in(name, names):
            return []
        restoring = self._restoring(names, specs, Source({}))
        return kinds.problems(self._objects[name], state[name], name, restoring)

    def restore(self, saved: SavedState, *, give: bool = False) -> None:
        """Restore everything tracked now, in place; keep the rest for objects that are tracked later.

        Args:
            saved: what the checkpoint holds.
            give: hand over tensors of it that only one object needs; nobody else may have a use for `saved` then.

        Raises:
            StateMismatch: something does not fit; nothing was changed, unless an object refused its state
            itself.
        """
        self._saved, self._restored, self._as_restored = saved, set(), {}
        self._saved_specs = _specs(saved)
        self._giving = Giving(saved.state.values()) if give else None
        self._refuse(self.check(tensors=self._saved_specs, state=saved.state))
        names = self._names()
        for name in self._objects:
            self._restore_one(name, names)
        self._note_as_restored()

    def check_initial(
        self, *, tensors: Mapping[str, Spec], state: Mapping[str, Json], weights_only: bool
    ) -> tuple[list[str], list[str]]:
        """What `initialize` would give values to, and everything that speaks against it; changes nothing.

        Args:
            tensors: as for `check`.
            state: `Index.state`.
            weights_only: as for `initialize`.
        """
        wanted = [
            name
            for name, obj in self._objects.items()
            if name in state and (not weights_only or isinstance(obj, nn.Module | torch.Tensor))
        ]
        if not wanted:
            lost = (
                f"none of the tracked names is there: {_listed(self.names)} are tracked, "
                f"it holds {_listed(list(state))}"
            )
            return [], [lost]
        names = self._names()
        return wanted, [line for name in wanted for line in self._problems(name, names, tensors, state)]

    def initialize(self, saved: SavedState, *, weights_only: bool) -> list[str]:
        """Give tracked objects the values that another run's checkpoint has under their names.

        Args:
            saved: that checkpoint.
            weights_only: only modules and tensors; else everything that is found.

        Returns:
            The names that got values.

        Raises:
            StateMismatch: nothing was found, or something does not fit; then nothing was changed.
        """
        specs = _specs(saved)
        wanted, problems = self.check_initial(tensors=specs, state=saved.state, weights_only=weights_only)
        self._refuse(problems)
        names = self._names()
        for name in wanted:
            restoring = self._restoring(names, specs, Source(saved.tensors))
            kinds.restore(self._objects[name], saved.state[name], name, restoring)
        return wanted

    def _restore_late(self, name: str) -> None:
        """Restore an object that was tracked after the restore, and optimizers that waited for its parameters."""
        assert self._saved is not None
        names, specs = self._names(), self._saved_specs
        waiting = [one for one in self._objects if one not in self._restored]
        self._refuse(
            [problem for one in waiting for problem in self._problems(one, names, specs, self._saved.state)]
        )
        written = self._written_since_restore()
        for one in waiting:
            self._restore_one(one, names)
        self._note_as_restored(but=written)
        if isinstance(self._objects[name], torch.optim.lr_scheduler.LRScheduler):
            self._repeat_options(self._objects[name].optimizer, names)

    def _restore_one(self, name: str, names: Names) -> None:
        assert self._saved is not None
        if self._unowned_in(name, names):
            return  # until the last of its parameters has a name
        self._restored.add(name)
        if name not in self._saved.state:
            if name not in self._new:
                self.skipped.append(f"{name}: tracked, not in the checkpoint")
            return
        source = Source(self._saved.tensors, giving=self._giving)
        restoring = self._restoring(names, self._saved_specs, source)
        kinds.restore(self._objects[name], self._saved.state[name], name, restoring)
        self._loaded.add(name)

    def _written_since_restore(self) -> set[str]:
        return {name for name, mark in self._as_restored.items() if self._mark_of(name) != mark}

    def _note_as_restored(self, *, but: Collection[str] = ()) -> None:
        """Mark all at once: objects may share tensors."""
        assert self._saved is not None
        names = (self._restored & self._saved.state.keys()) - set(but)
        self._as_restored.update({name: self._mark_of(name) for name in names})

    def _mark_of(self, name: str) -> BuffersMark:
        return VersionWatch().mark(part for _, part in kinds.parts(self._objects[name], name))

    def _repeat_options(self, optimizer: torch.optim.Optimizer, names: Names) -> None:
        """A scheduler's constructor sets its optimizer's lr; made after the restore, it overwrote the saved one."""
        assert self._saved is not None
        for name in self._restored & self._saved.state.keys():
            for at, part, saved in kinds.saved_parts(self._objects[name], self._saved.state[name], name):
                if part is optimizer:
                    restoring = self._restoring(names, self._saved_specs, Source(self._saved.tensors))
                    restore_group_options(part, saved, at, restoring)

    def _restoring(self, names: Names, specs: Mapping[str, Spec], source: Source) -> Restoring:
        return Restoring(
            source=source,
            specs=specs,
            strict=self._strict,
            names=names.of,
            aliases=names.aliases,
            warn=self._warn_once,
            skipped=self.skipped,
        )

    def arrived(self) -> None:
        """The program has come to the end of the loop in which the checkpoint was taken, or goes on in it.

        In a loop of its own it is there at once.

        What it tracks from here on, for a later stage, may have been made after the checkpoint: it is restored
        if it is there, and else stays as it was made.
        """
        self._arrived = True
        written = sorted(self._written_since_restore())
        self._as_restored.clear()
        if written:
            self._warn(
                f"{_listed(written, between=', ')}: written after the restore and before the loop goes on, so what "
                "was trained is lost; set first values before the session, or only if run.resumed_from is None"
            )

    def judge(self) -> None:
        """Everything is tracked by now: refuse what has no owner, and free what the checkpoint held.

        Raises:
            UntrackedParameters: an optimizer holds a parameter that no tracked object owns.
            StateMismatch: the checkpoint holds names that nobody claimed (with `strict`; else a warning).
        """
        self._refuse_unowned(self._names())
        if self._saved is None:
            return
        left = [name for name in self._saved.state if name not in self._objects]
        if left and self._strict:
            self._refuse(
                [f"{name}: in the checkpoint, but not tracked; run.track({name}=...)" for name in left]
            )
        if left:
            self.skipped += [f"{name}: in the checkpoint, not tracked" for name in left]
        if self.skipped:
            self._warn(f"not restored (strict=False): {_listed(self.skipped)}")
        self.release()

    def release(self) -> None:
        """Free what the checkpoint held; objects that are tracked from now on are not restored."""
        self._saved, self._saved_specs, self._giving = None, {}, None

    def _refuse(self, problems: Sequence[str]) -> None:
        if problems:
            lines = _listed(problems, between="\n  ")
            raise StateMismatch(
                f"the checkpoint does not fit the program:\n  {lines}",
                problems=problems,
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)


def _specs(saved: SavedState) -> dict[str, Spec]:
    return {name: spec_of(tensor) for name, tensor in saved.tensors.items()}


def _listed(lines: Sequence[str], *, between: str = "; ") -> str:
    return between.join(lines)
