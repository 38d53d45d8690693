"""The real code without one of its rules, rule by rule: what a search must find."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from spotsafe import opening, reader
from spotsafe.checkpoint import candidates, catalog, claim as claims, cleaning, gc, pins, publish, rollback
from spotsafe.checkpoint.attempts import read_attempt, read_branch
from spotsafe.checkpoint.candidates import Candidate
from spotsafe.checkpoint.manifest import ABANDONED, RETIRED, Marker, encode_marker
from spotsafe.checkpoint.references import Needed
from spotsafe.errors import (
    DamagedCheckpoint,
    StorageError,
    StorageNotFound,
    StorageUnavailable,
    UnsupportedFormat,
)
from spotsafe.ledger import occupancy
from spotsafe.policy import retention
from spotsafe.storage.wrapping import WrappingStore
from spotsafe.testing.schedules import Scenario
from spotsafe.writer import lending, tidying, upload
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
    every: bool = False
    """Whether to go through all orders instead of random ones: what needs two exact switches is found sooner so."""


def _go_back_without_a_pin(patch: Patch) -> None:
    patch.setattr(rollback, "place_pin", lambda *_, **__: None)


def _forget_the_rollbacks(patch: Patch) -> None:
    patch.setattr(claims, "read_branch", lambda *_: ())


def _claim_by_the_rollbacks_of_the_look(patch: Patch) -> None:
    taken = claims._taken

    def as_seen(store: Any, number: int) -> Any:
        other = taken(store, number)
        return dataclasses.replace(other, rollbacks=read_attempt(store, number - 1).rollbacks)

    patch.setattr(claims, "_taken", as_seen)


def _nothing_is_set_aside(patch: Patch) -> None:
    patch.setattr(candidates, "on_branch", lambda names, _: tuple(names))


def _count_what_is_set_aside(patch: Patch) -> None:
    patch.setattr(gc, "is_set_aside", lambda *_: False)


def _add_to_the_present_rollbacks(patch: Patch) -> None:
    patch.setattr(claims, "branch_at", lambda store, listing, _: read_branch(store, listing))


def _let_go_of_what_was_gone_back_to(patch: Patch) -> None:
    patch.setattr(gc, "FLOOR", 0)


def _believe_only_what_is_published(patch: Patch) -> None:
    patch.setattr(candidates, "with_its_pin", lambda _, candidate, __: candidate)


def _judge_what_was_gone_back_to(patch: Patch) -> None:
    patch.setattr(reader, "gone_back_to", lambda _: None)


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


def _what_is_gone_stops_the_start(patch: Patch) -> None:
    load = opening.load_chosen

    def load_chosen(*rest: Any, **options: Any) -> Any:
        try:
            return load(*rest, **options)
        except StorageNotFound as error:
            raise StorageError(str(error), path=error.path) from None

    patch.setattr(opening, "load_chosen", load_chosen)


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


def _do_not_ask_who_is_there(patch: Patch) -> None:
    patch.setattr(occupancy.Occupancy, "check", lambda *_: None)


def _do_not_ask_who_won_the_claim(patch: Patch) -> None:
    claim = opening.claim
    patch.setattr(opening, "claim", lambda store, **rest: claim(store, **{**rest, "met": lambda _: None}))


def _do_not_watch(patch: Patch) -> None:
    in_use = occupancy.in_use
    patch.setattr(occupancy, "in_use", lambda who, **rest: in_use(who, **{**rest, "wait": lambda _: None}))


def _whoever_was_there_is_there(patch: Patch) -> None:
    patch.setattr(
        occupancy, "in_use", lambda who, *, identity, **_: who is not None and who.job != identity.job
    )


def _believe_the_store(patch: Patch) -> None:
    patch.setattr(opening, "is_exclusive", lambda *_: True)


def _sweep_after_the_dead(patch: Patch) -> None:
    patch.setattr(tidying.Tidying, "_may_delete", lambda *_: gc.anything)


def _delete_own_failed_saves(patch: Patch) -> None:
    tidy = tidying.Tidying.after_publish

    def tidy_all(self: Any, *rest: Any, **options: Any) -> None:
        for name in [name for name, tried in self._leftovers.items() if tried]:
            gc.discard(self._store, name, manifest_tried=True, on_event=self._emit)
            del self._leftovers[name]
        tidy(self, *rest, **options)

    patch.setattr(tidying.Tidying, "after_publish", tidy_all)


def _end_without_a_word_of_failed_saves(patch: Patch) -> None:
    patch.setattr(upload.Uploader, "undecided", False)


def _do_not_look_at_the_own_record(patch: Patch) -> None:
    real = publish.publish
    patch.setattr(
        upload, "publish", lambda *rest, **options: real(*rest, **{**options, "single_writer": False})
    )


def _try_the_store_by_another_nonce(patch: Patch) -> None:
    encode = claims.encode_record

    def encoded(record: Any) -> bytes:
        trial = record.version.endswith(claims._TRIAL)
        return encode(dataclasses.replace(record, nonce="ffffffff") if trial else record)

    patch.setattr(claims, "encode_record", encoded)


def _pins(patch: Patch, *, blind: Callable[[int], bool]) -> None:
    """Leave out looks for pins of a retention, which makes two; `blind` is told the number of the look."""
    retire, look = cleaning.Cleaning.retire, cleaning.pinned
    looks: list[int] = []

    def pinned(store: Any, names: Any, *, now: float) -> Any:
        if looks:
            looks[0] += 1
            if blind(looks[0]):
                return frozenset()
        return look(store, names, now=now)

    def counted(self: Any, names: Any) -> Any:
        looks.append(0)
        try:
            return retire(self, names)
        finally:
            looks.clear()

    patch.setattr(cleaning, "pinned", pinned)
    patch.setattr(cleaning.Cleaning, "retire", counted)


def _pin_without_a_second_look(patch: Patch) -> None:
    read = pins._read_manifest
    seen = weakref.WeakKeyDictionary[Any, dict[Any, bytes]]()

    def once(store: Any, name: Any) -> bytes:
        known = seen.setdefault(store, {})
        if name not in known:
            known[name] = read(store, name)
        return known[name]

    patch.setattr(pins, "_read_manifest", once)


def _pins_without_a_copy(patch: Patch) -> None:
    patch.setattr(candidates, "pinned_manifest", lambda *_: None)
    patch.setattr(catalog, "pinned_manifest", lambda *_: None)


def _pinned_refer_to_nothing(patch: Patch) -> None:
    patch.setattr(cleaning, "pinned_manifests", lambda *_, **__: [])


def _trim_what_is_pinned(patch: Patch) -> None:
    trim, look = cleaning.Cleaning.trim, cleaning.pinned

    def blindly(self: Any, *rest: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(cleaning, "pinned", lambda *_, **__: frozenset())
            return trim(self, *rest, **options)

    assert look is pins.pinned
    patch.setattr(cleaning.Cleaning, "trim", blindly)


def _an_unreadable_pin_is_none(patch: Patch) -> None:
    read = pins._read_pin

    def hopeful(store: Any, file: str) -> Any:
        pin = read(store, file)
        if pin is None:
            raise StorageNotFound("what cannot be read keeps nothing", path=file)
        return pin

    def pinned(store: Any, names: Any, *, now: float) -> Any:
        with suppress(StorageNotFound):
            return real(store, names, now=now)
        return frozenset()

    real = pins.pinned
    patch.setattr(pins, "_read_pin", hopeful)
    patch.setattr(cleaning, "pinned", pinned)


def _no_list_of_pins_is_none(patch: Patch) -> None:
    real = pins.pinned

    def hopeful(store: Any, names: Any, *, now: float) -> Any:
        try:
            return real(store, names, now=now)
        except StorageUnavailable:
            return frozenset()

    patch.setattr(cleaning, "pinned", hopeful)


class _Postponing(WrappingStore):
    def __init__(self, inner: Any, later: list[Callable[[], None]]) -> None:
        super().__init__(inner)
        self._later = later

    def put(self, path: str, data: bytes) -> None:
        self._later.append(lambda: self.inner.put(path, data))


NO_FAULTS = dict.fromkeys(scenarios.FAULTS, 0) | {"blind": 0}
LATE = NO_FAULTS | {"kill-late": 2, "late": 3, "fail": 6}
"""What an attempt on a store that ignores conditions has to fear of itself and of those before it."""

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
    "3: a file that is gone stops the start": Mutation(
        rule="3",
        off=_what_is_gone_stops_the_start,
        scenario=scenarios.from_nothing,
        finds="ends by StorageError",
        faults=NO_FAULTS,
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
    "10: the next record forgets it": Mutation(
        rule="10",
        off=_forget_the_rollbacks,
        scenario=scenarios.going_back_to_an_older_one,
        finds="forgets|resumes from",
        faults=NO_FAULTS,
    ),
    "10: the rollbacks are those of the look": Mutation(
        rule="10",
        off=_claim_by_the_rollbacks_of_the_look,
        scenario=scenarios.going_back_to_an_older_one,
        finds="forgets",
        faults=NO_FAULTS,
    ),
    "10: what was set aside is resumed from": Mutation(
        rule="10",
        off=_nothing_is_set_aside,
        scenario=scenarios.going_back_to_an_older_one,
        finds="set aside",
        faults=NO_FAULTS,
    ),
    "10: what was set aside is counted": Mutation(
        rule="10",
        off=_count_what_is_set_aside,
        scenario=scenarios.going_back_to_an_older_one,
        finds="set aside",
        faults=NO_FAULTS,
    ),
    "10: a second rollback adds to the first": Mutation(
        rule="10",
        off=_add_to_the_present_rollbacks,
        scenario=scenarios.going_back_and_forth,
        finds="does not count",
        faults=NO_FAULTS,
    ),
    "10: its pin goes at once": Mutation(
        rule="10",
        off=_let_go_of_what_was_gone_back_to,
        scenario=scenarios.going_back_to_an_older_one,
        finds="lets go",
        faults=NO_FAULTS,
    ),
    "10: its pin does not count": Mutation(
        rule="10",
        off=_believe_only_what_is_published,
        scenario=scenarios.going_back_to_an_older_one,
        finds="was there when|NoUsableCheckpoint",
        faults=NO_FAULTS,
    ),
    "10: what was gone back to is judged": Mutation(
        rule="10",
        off=_judge_what_was_gone_back_to,
        scenario=scenarios.going_back_and_forth,
        finds="was there when",
        faults=NO_FAULTS,
    ),
    "11: nobody is asked for": Mutation(
        rule="11",
        off=_do_not_ask_who_is_there,
        scenario=scenarios.two_jobs,
        finds="of another job and alive",
        faults=NO_FAULTS,
    ),
    "11: nobody is asked for after a lost claim": Mutation(
        rule="11",
        off=_do_not_ask_who_won_the_claim,
        scenario=scenarios.two_jobs,
        finds="of another job and alive",
        faults=NO_FAULTS,
    ),
    "11: a heart is looked at and not watched": Mutation(
        rule="11",
        off=_do_not_watch,
        scenario=scenarios.two_jobs,
        finds="of another job and alive",
        faults=NO_FAULTS,
    ),
    "11: who is dead keeps others out": Mutation(
        rule="11",
        off=_whoever_was_there_is_there,
        scenario=scenarios.two_jobs,
        finds="ends by RunInUse",
        faults=NO_FAULTS,
    ),
    "12: the store is believed": Mutation(
        rule="12",
        off=_believe_the_store,
        scenario=scenarios.one_after_the_other,
        finds="is published, and",
        faults=LATE,
    ),
    "12: sweep what a dead attempt was writing": Mutation(
        rule="12",
        off=_sweep_after_the_dead,
        scenario=scenarios.one_after_the_other,
        finds="is published, and",
        faults=LATE,
    ),
    "12: delete a save whose manifest may arrive": Mutation(
        rule="12",
        off=_delete_own_failed_saves,
        scenario=scenarios.one_after_the_other,
        finds="is published, and",
        faults=LATE,
    ),
    "12: an end without a word of such a save": Mutation(
        rule="12",
        off=_end_without_a_word_of_failed_saves,
        scenario=scenarios.one_after_the_other,
        finds="is published, and",
        faults=LATE,
    ),
    "12: no look at the own record": Mutation(
        rule="12",
        off=_do_not_look_at_the_own_record,
        scenario=scenarios.one_after_the_other,
        finds="goes on",
        faults=LATE,
    ),
    "12: a trial takes the own record away": Mutation(
        rule="12",
        off=_try_the_store_by_another_nonce,
        scenario=scenarios.one_after_the_other,
        finds="ends as superseded, and is the newest",
        faults=NO_FAULTS | {"lie": 1, "late": 1},
    ),
    "pins: no look before the first manifest": Mutation(
        rule="pins",
        off=lambda patch: _pins(patch, blind=lambda look: look == 1),
        scenario=scenarios.one_reader,
        finds="has pinned before",
        faults=NO_FAULTS,
    ),
    "pins: no look before the first file": Mutation(
        rule="pins",
        off=lambda patch: _pins(patch, blind=lambda look: look == 2),
        scenario=scenarios.one_reader,
        finds="is pinned by",
        faults=NO_FAULTS,
        every=True,
    ),
    "pins: the reader does not look again": Mutation(
        rule="pins",
        off=_pin_without_a_second_look,
        scenario=scenarios.one_reader,
        finds="is pinned by|ends by CheckpointNotFound",
        faults=NO_FAULTS,
        every=True,
    ),
    "pins: no copy of the manifest": Mutation(
        rule="pins",
        off=_pins_without_a_copy,
        scenario=scenarios.one_reader,
        finds="ends by CheckpointNotFound",
        faults=NO_FAULTS,
        every=True,
    ),
    "pins: what a pinned one refers to may go": Mutation(
        rule="pins",
        off=_pinned_refer_to_nothing,
        scenario=scenarios.one_reader,
        finds="is pinned by",
        faults=NO_FAULTS,
        every=True,
    ),
    "pins: what is left of a pinned one may go": Mutation(
        rule="pins",
        off=_trim_what_is_pinned,
        scenario=scenarios.a_reader_of_what_is_lent,
        finds="is pinned by",
        faults=NO_FAULTS,
        every=True,
    ),
    "pins: one that cannot be read keeps nothing": Mutation(
        rule="pins",
        off=_an_unreadable_pin_is_none,
        scenario=scenarios.one_reader,
        finds="is pinned by|has pinned before",
        faults=NO_FAULTS | {"wrong": 3},
    ),
    "pins: that cannot be listed are none": Mutation(
        rule="pins",
        off=_no_list_of_pins_is_none,
        scenario=scenarios.one_reader,
        finds="is pinned by|has pinned before",
        faults=NO_FAULTS | {"fail": 4},
    ),
    "13: what was acknowledged is there": Mutation(
        rule="13",
        off=_sizes_are_not_asked,
        scenario=scenarios.from_nothing,
        finds="is published, and",
        faults=NO_FAULTS | {"short": 1},
    ),
}

NOT_SWITCHED_OFF = {
    "1: no path is written twice": "stores refuse it, and tests/storage shows that they do",
    "2: after a lost claim the next number, no new listing": "saves time; another listing would break nothing",
    "4: who is superseded publishes no references": (
        "the last look before deleting guards the same; what is left takes three exact switches, and was not found"
    ),
    "5: uploads that were begun are given up": "what is not given up is garbage, and breaks no promise",
    "6: no reference after a resume that passed over something": (
        "the attempts of the search refer even then, and nothing breaks: they ask for the size, who deletes looks again"
    ),
    "7: a refused delete is a warning": "no promise about checkpoints; tests/checkpoint",
    "8: all bytes, on all ranks, before the first is loaded": "the attempts of the search are of one rank",
    "9: the third start that passes over to the same parent": "no question of orders; tests/policy",
    "11: takeover": "says that the rule is not wanted",
    "12: the session says so": "no promise about checkpoints; tests/session",
    "13: durable": "a store in memory forgets nothing; tests/storage loses what was not synced",
    "13: the sweep after the first publish": "what is not swept is garbage, and breaks no promise",
}
"""What else the rules of docs/DESIGN.md say, and why no search is made without it."""
