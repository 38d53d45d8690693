"""What a reader's pin promises, as rules of a search.

- A checkpoint is whole from the moment its pin stands until the pin is gone, though it may have been withdrawn.
- No save that began when the pin stood withdraws it, and nobody but its reader removes the pin.
- What a reader reads, with a pin or without, is what was saved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from spotsafe.checkpoint.layout import PINS, CheckpointName, parse_pin
from spotsafe.testing.cloud import Objects
from spotsafe.testing.schedules import LANDING, Broken, Step
from spotsafe.testing.seen import pinned_by, problem


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingPin:
    """A pin that a process has created."""

    path: str
    reader: str
    """The process."""
    sure: bool = False
    """Whether it knows that the checkpoint was there afterwards; only then it counts."""
    excused: frozenset[str] = frozenset()
    """Processes that were writing a save by then, whose clean-up may have looked for pins before."""

    @property
    def name(self) -> CheckpointName | None:
        """What it keeps."""
        return parse_pin(self.path.removeprefix(f"{PINS}/"))


Pins = frozenset[StandingPin]


def after_effect(pins: Pins, step: Step) -> Pins:
    """What stands after a pin was created or deleted.

    Raises:
        Broken: somebody else removed a reader's pin.
    """
    path = step.request.path
    if step.request.name == "create":
        return pins | {StandingPin(path=path, reader=step.who)}
    for pin in pins:
        if pin.path == path and pin.sure and pin.reader != step.who:
            raise Broken(f"{step.who} removes {path}, which {pin.reader} has placed")
    return frozenset(pin for pin in pins if pin.path != path)


def placed(pins: Pins, step: Step, name: CheckpointName, *, saving: frozenset[str]) -> Pins:
    """A reader tells that it has pinned a checkpoint while these processes were writing."""
    mine = {pin for pin in pins if pin.reader == step.who and pin.name == name}
    if not mine:
        raise Broken(f"{step.who} believes that it has pinned {name}")
    return (pins - mine) | {replace(pin, sure=True, excused=saving) for pin in mine}


def after_save_began(pins: Pins, who: str) -> Pins:
    """A process begins another save: what stands now it must see."""
    return frozenset(replace(pin, excused=pin.excused - {who}) for pin in pins)


def check_kept(pins: Pins, step: Step, name: CheckpointName) -> None:
    """A manifest is withdrawn.

    Raises:
        Broken: by a clean-up that must have seen the pin.
    """
    for pin in pins:
        if pin.sure and pin.name == name and step.choice.who != LANDING and step.who not in pin.excused:
            raise Broken(f"{step.who} withdraws {name}, which {pin.reader} has pinned before")


def check_pinned_whole(pins: Pins, objects: Objects, rotten: frozenset[str]) -> None:
    """Whatever became of the manifests, the files are there.

    Raises:
        Broken: something of a pinned checkpoint is gone.
    """
    for pin in pins:
        manifest = pinned_by(objects[pin.path]) if pin.sure else None
        if manifest is not None and str(manifest.name) not in rotten:
            text = problem(manifest, objects)
            if text:
                raise Broken(f"{manifest.name} is pinned by {pin.reader}, and {text}")


def harmed(pins: Pins, objects: Objects) -> frozenset[str]:
    """Pinned checkpoints that are not whole: after a disk or a person has done something."""
    found = [pinned_by(objects[pin.path]) for pin in pins if pin.path in objects]
    return frozenset(str(one.name) for one in found if one is not None and problem(one, objects))


def check_read(step: Step, name: CheckpointName, values: frozenset[float]) -> None:
    """A reader tells what it has read of a checkpoint whose tensors hold their step, or NaN.

    Raises:
        Broken: that is not what was saved.
    """
    if any(value != name.step and not math.isnan(value) for value in values):
        raise Broken(f"{step.who} reads {set(values)} of {name}")
