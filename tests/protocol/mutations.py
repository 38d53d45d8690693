"""The real code without one of its rules, rule by rule: what a search must find."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from spotsafe import opening, reader
from spotsafe.checkpoint import candidates, cleaning, gc, publish, rollback
from spotsafe.checkpoint.candidates import Candidate
from spotsafe.checkpoint.manifest import ABANDONED, RETIRED, Marker, encode_marker
from spotsafe.checkpoint.references import Needed
from spotsafe.errors import DamagedCheckpoint, StorageUnavailable, UnsupportedFormat
from spotsafe.policy import retention
from spotsafe.storage.wrapping import WrappingStore
from spotsafe.testing.schedules import Scenario
from spotsafe.writer import lending, upload
from tests.protocol import scenarios

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A rule that is switched off."""

    rule: str
    off: Callable[[Patch], None]
    scenario: Callable[[], Scenario]
    finds: str
    """A pattern of what the search says."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """Other limits than the scenario's: a search with fewer kinds of faults finds sooner."""


def _go_back_without_a_pin(patch: Patch) -> None:
    patch.setattr(rollback, "place_pin", lambda *_, **__: None)


def _order_by_step(patch: Patch) -> None:
    before = candidates._newest_first

    def newest_first(folders: Any) -> Any:
        return tuple(sorted(before(folders), key=lambda name: (name.step, name.attempt), reverse=True))

    patch.setattr(candidates, "_newest_first", newest_first)


class _AlwaysFirst(WrappingStore):
    """Overwrites what is there, and says that nothing was."""

    def create(self, path: str, data: bytes) -> bool:
        self.inner.replace(path, data)
        return True


def _claim_without_asking(patch: Patch) -> None:
    claim = opening.claim
    patch.setattr(opening, "claim", lambda store, **rest: claim(_AlwaysFirst(store), **rest))


def _no_look_after_the_claim(patch: Patch) -> None:
    look, seen = opening.look, weakref.WeakKeyDictionary[Any, Any]()

    def once(store: Any) -> Any:
        if store not in seen:
            seen[store] = look(store)
        return seen[store]

    patch.setattr(opening, "look", once)


def _an_error_is_none(patch: Patch) -> None:
    read = candidates.read_candidate

    def hopeful(store: Any, name: Any) -> Any:
        try:
            return read(store, name)
        except StorageUnavailable:
            return Candidate(name=name)

    patch.setattr(candidates, "read_candidate", hopeful)


def _no_history(patch: Patch) -> None:
    patch.setattr(opening, "check_history", lambda *_, **__: None)


def _one_look_is_enough(patch: Patch) -> None:
    def look_and(find: Any, store: Any) -> Any:
        listing = opening.look(store)
        return listing, find(listing)

    patch.setattr(opening, "_look_and", look_and)


def _looks(patch: Patch, *, first: bool, second: bool) -> None:
    """Leave out one of the two looks of a publish."""
    real, calls = publish.publish, weakref.WeakKeyDictionary[Any, list[Any]]()
    look = publish.newer_attempt

    def newer_attempt(store: Any, attempt: int, **rest: Any) -> Any:
        answers = calls[store]
        wanted = second if answers else first
        answers.append(look(store, attempt, **rest) if wanted else (answers or [None])[0])
        return answers[-1]

    def begin(store: Any, *rest: Any, **options: Any) -> Any:
        calls[store] = []
        return real(store, *rest, **options)

    patch.setattr(publish, "newer_attempt", newer_attempt)
    patch.setattr(upload, "publish", begin)


def _delete_though_superseded(patch: Patch) -> None:
    patch.setattr(publish.PublishOutcome, "may_delete", property(lambda outcome: outcome.published))


def _sweep_without_deciding(patch: Patch) -> None:
    def believe(self: Any) -> bool:
        for name in sorted(self.folders):
            if self.is_open(name):
                self.markers[name] = Marker(state=ABANDONED)
        return False

    patch.setattr(cleaning.Cleaning, "decide_all", believe)


def _sweep_everybody(patch: Patch) -> None:
    sweep = gc.sweep
    patch.setattr(gc, "sweep", lambda store, *, attempt, **rest: sweep(store, attempt=1 << 40, **rest))


def _delete_the_manifest_of_another(patch: Patch) -> None:
    withdraw = cleaning.withdraw

    def as_if_own(store: Any, name: Any, *, attempt: int, in_use: Any) -> Any:
        return withdraw(store, name, attempt=name.attempt, in_use=in_use)

    patch.setattr(cleaning, "withdraw", as_if_own)


def _keep_one(patch: Patch) -> None:
    patch.setattr(retention, "FLOOR", 1)


def _all_are_healthy(patch: Patch) -> None:
    saved = gc._saved
    patch.setattr(gc, "_saved", lambda manifest: dataclasses.replace(saved(manifest), healthy=True))


def _forget_the_origin(patch: Patch) -> None:
    patch.setattr(retention, "_still_needed", lambda *_, **__: False)


def _touch_what_was_passed_over(patch: Patch) -> None:
    real = gc.Retention
    patch.setattr(gc, "Retention", lambda **options: real(**{**options, "passed_over": frozenset()}))


def _files_first(patch: Patch) -> None:
    withdraw = cleaning.withdraw

    def files_first(store: Any, name: Any, *, attempt: int, in_use: Any) -> Any:
        for path in store.list(name.folder):
            if path.path != name.manifest:
                store.delete(path.path)
        return withdraw(store, name, attempt=attempt, in_use=in_use)

    patch.setattr(cleaning, "withdraw", files_first)


def _no_confirmation(patch: Patch) -> None:
    def withdraw(store: Any, name: Any, *, attempt: int, in_use: Any) -> Any:
        marker = Marker(state=RETIRED, in_use=tuple(sorted(in_use)))
        if name.attempt == attempt and not in_use:
            store.delete(name.manifest)
            return None
        store.replace(name.manifest, encode_marker(marker))
        return marker

    patch.setattr(cleaning, "withdraw", withdraw)


def _no_obstacle(patch: Patch) -> None:
    patch.setattr(cleaning.Cleaning, "_is_obstructed", lambda *_: False)


def _believe_the_first_read(patch: Patch) -> None:
    def read_candidate(store: Any, name: Any) -> Any:
        try:
            return candidates._read_once(store, name)
        except (DamagedCheckpoint, UnsupportedFormat) as error:
            return Candidate(name=name, fault=error)

    patch.setattr(candidates, "read_candidate", read_candidate)


def _an_error_is_damage(patch: Patch) -> None:
    load = opening.load_chosen

    def load_chosen(store: Any, choice: Any, *, unusable: Any, **rest: Any) -> Any:
        try:
            return load(store, choice, unusable=unusable, **rest)
        except StorageUnavailable as error:
            unusable[choice.name] = str(error)
            return None

    patch.setattr(opening, "load_chosen", load_chosen)


def _health_does_not_matter(patch: Patch) -> None:
    patch.setattr(reader, "_sick", lambda _: "")


def _sizes_are_not_asked(patch: Patch) -> None:
    patch.setattr(upload.Uploader, "_confirm", lambda *_: None)


def _manifest_first(patch: Patch) -> None:
    real = upload.Uploader._write_index

    def write_index(self: Any, job: Any, files: Any) -> Any:
        """Tell what the index will be; write it only when the manifest is there."""
        later: list[Callable[[], None]] = self.__dict__.setdefault("later", [])
        store = self._store
        self._store = _Postponing(store, later)
        try:
            return real(self, job, files)
        finally:
            self._store = store

    publishing = upload.Uploader._publish

    def publish_first(self: Any, *rest: Any) -> None:
        try:
            publishing(self, *rest)
        finally:
            for write in self.__dict__.pop("later", []):
                write()

    patch.setattr(upload.Uploader, "_write_index", write_index)
    patch.setattr(upload.Uploader, "_publish", publish_first)
    patch.setattr(upload.Uploader, "_confirm", lambda *_: None)


def _do_not_look_again(patch: Patch) -> None:
    patch.setattr(cleaning.Cleaning, "_has_grown", lambda _: False)


def _refer_without_asking(patch: Patch) -> None:
    patch.setattr(lending.Lender, "_is_there", lambda *_: True)


def _delete_what_others_need(patch: Patch) -> None:
    patch.setattr(cleaning.Cleaning, "needed", lambda *_, **__: Needed())


class _Postponing(WrappingStore):
    def __init__(self, inner: Any, later: list[Callable[[], None]]) -> None:
        super().__init__(inner)
        self._later = later

    def put(self, path: str, data: bytes) -> None:
        self._later.append(lambda: self.inner.put(path, data))


NO_FAULTS = dict.fromkeys(scenarios.FAULTS, 0) | {"blind": 0}

MUTATIONS = {
    "1: the newest is the one with the most steps": Mutation(
        rule="1", off=_order_by_step, scenario=scenarios.with_a_past, finds="resumes from", faults=NO_FAULTS
    ),
    "2: a claim overwrites another": Mutation(
        rule="2",
        off=_claim_without_asking,
        scenario=scenarios.from_nothing,
        finds="is written again",
        faults=NO_FAULTS,
    ),
    "2: no look after the claim": Mutation(
        rule="2",
        off=_no_look_after_the_claim,
        scenario=scenarios.from_nothing,
        finds="was there when",
        faults=NO_FAULTS,
    ),
    "3: a manifest that cannot be read is none": Mutation(
        rule="3",
        off=_an_error_is_none,
        scenario=scenarios.from_nothing,
        finds="was there when",
        faults=NO_FAULTS | {"fail": 4},
    ),
    "3: fresh although somebody has published": Mutation(
        rule="3",
        off=_no_history,
        scenario=scenarios.with_a_past,
        finds="resumes from None",
        faults=NO_FAULTS | {"blind": 2},
    ),
    "3: nothing can be chosen, says one look": Mutation(
        rule="3",
        off=_one_look_is_enough,
        scenario=scenarios.from_nothing,
        finds="ends by NoUsableCheckpoint",
        faults=NO_FAULTS,
    ),
    "4: no look before the manifest": Mutation(
        rule="4",
        off=lambda patch: _looks(patch, first=False, second=True),
        scenario=scenarios.two,
        finds="goes on",
        faults=NO_FAULTS | {"fail": 4},
    ),
    "4: no look behind the manifest": Mutation(
        rule="4",
        off=lambda patch: _looks(patch, first=True, second=False),
        scenario=scenarios.two_and_a_bad_disk,
        finds="which attempt . resumed from",
        faults=NO_FAULTS,
    ),
    "4: delete whoever is the newest": Mutation(
        rule="4",
        off=_delete_though_superseded,
        scenario=scenarios.with_a_past,
        finds="gone|resumed from|is published, and|goes back",
        faults=NO_FAULTS,
    ),
    "4: the manifest before the index": Mutation(
        rule="4",
        off=_manifest_first,
        scenario=scenarios.from_nothing,
        finds="is published, and",
        faults=NO_FAULTS,
    ),
    "5: sweep without deciding the name": Mutation(
        rule="5",
        off=_sweep_without_deciding,
        scenario=scenarios.from_nothing,
        finds="is published, and",
        faults=NO_FAULTS,
    ),
    "5: sweep what newer attempts write": Mutation(
        rule="5",
        off=_sweep_everybody,
        scenario=scenarios.two,
        finds="a save of . fails: StorageNotFound|is the newest",
        faults=NO_FAULTS,
    ),
    "5: delete the manifest of another attempt": Mutation(
        rule="5",
        off=_delete_the_manifest_of_another,
        scenario=scenarios.two,
        finds="is published, and",
        faults=NO_FAULTS | {"lost": 1},
    ),
    "5: delete what others refer to": Mutation(
        rule="5",
        off=_delete_what_others_need,
        scenario=scenarios.lending,
        finds="is published, and",
        faults=NO_FAULTS,
    ),
    "5: delete by a look that has grown old": Mutation(
        rule="5",
        off=_do_not_look_again,
        scenario=scenarios.cleaning,
        finds="is published, and",
        faults=NO_FAULTS,
    ),
    "6: refer without asking for the size": Mutation(
        rule="6",
        off=_refer_without_asking,
        scenario=scenarios.lending,
        finds="is published, and",
        faults=NO_FAULTS,
    ),
    "7: one checkpoint is enough": Mutation(
        rule="7",
        off=_keep_one,
        scenario=scenarios.with_a_past,
        finds="resumed from|goes back",
        faults=NO_FAULTS,
    ),
    "7: unhealthy ones count": Mutation(
        rule="7",
        off=_all_are_healthy,
        scenario=scenarios.ailing,
        finds="resumed from|goes back",
        faults=NO_FAULTS,
    ),
    "7: the origin may go": Mutation(
        rule="7",
        off=_forget_the_origin,
        scenario=scenarios.ill_from_birth,
        finds="resumed from",
        faults=NO_FAULTS,
    ),
    "7: what was passed over may go": Mutation(
        rule="7",
        off=_touch_what_was_passed_over,
        scenario=scenarios.with_a_past,
        finds="passed over",
        faults=NO_FAULTS,
    ),
    "7: files before manifests": Mutation(
        rule="7",
        off=_files_first,
        scenario=scenarios.with_a_past,
        finds="is published, and",
        faults=NO_FAULTS,
    ),
    "7: not confirmed": Mutation(
        rule="7",
        off=_no_confirmation,
        scenario=scenarios.with_a_past,
        finds="is published, and",
        faults=NO_FAULTS | {"lie": 1},
    ),
    "7: delete beside a newer attempt": Mutation(
        rule="7",
        off=_no_obstacle,
        scenario=scenarios.with_a_past,
        finds="resumed from|goes back",
        faults=NO_FAULTS,
    ),
    "8: the first read is believed": Mutation(
        rule="8",
        off=_believe_the_first_read,
        scenario=scenarios.with_a_past,
        finds="was there when",
        faults=NO_FAULTS | {"wrong": 2},
    ),
    "8: a storage error is damage": Mutation(
        rule="8",
        off=_an_error_is_damage,
        scenario=scenarios.two_and_a_bad_disk,
        finds="was there when",
        faults=NO_FAULTS | {"fail": 4},
    ),
    "9: health does not matter": Mutation(
        rule="9",
        off=_health_does_not_matter,
        scenario=scenarios.ailing,
        finds="was there when",
        faults=NO_FAULTS,
    ),
    "10: go back without a pin": Mutation(
        rule="10",
        off=_go_back_without_a_pin,
        scenario=scenarios.going_back_to_an_older_one,
        finds="goes back|resumed from",
        faults=NO_FAULTS,
    ),
    "13: what was acknowledged is there": Mutation(
        rule="13",
        off=_sizes_are_not_asked,
        scenario=scenarios.from_nothing,
        finds="is published, and",
        faults=NO_FAULTS | {"short": 1},
    ),
}
