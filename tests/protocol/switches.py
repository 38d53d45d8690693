"""What takes a part of a rule out of the real code, for as long as a test lasts."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from spotsafe import opening, reader
from spotsafe.checkpoint import (
    attempts,
    candidates,
    catalog,
    claim as claims,
    cleaning,
    clearing,
    gc,
    pins,
    publish,
    rollback,
)
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
from spotsafe.testing import protocol
from spotsafe.writer import lending, tidying, upload

Patch = pytest.MonkeyPatch


def go_back_without_a_pin(patch: Patch) -> None:
    patch.setattr(rollback, "place_pin", lambda *_, **__: None)


def forget_the_rollbacks(patch: Patch) -> None:
    patch.setattr(claims, "read_branch", lambda *_: ())


def claim_by_the_rollbacks_of_the_look(patch: Patch) -> None:
    taken = claims._taken

    def as_seen(store: Any, number: int) -> Any:
        other = taken(store, number)
        return dataclasses.replace(other, rollbacks=read_attempt(store, number - 1).rollbacks)

    patch.setattr(claims, "_taken", as_seen)


def nothing_is_set_aside(patch: Patch) -> None:
    patch.setattr(candidates, "on_branch", lambda names, _: tuple(names))


def count_what_is_set_aside(patch: Patch) -> None:
    patch.setattr(gc, "is_set_aside", lambda *_: False)


def add_to_the_present_rollbacks(patch: Patch) -> None:
    patch.setattr(claims, "branch_at", lambda store, listing, _: read_branch(store, listing))


def let_go_of_what_was_gone_back_to(patch: Patch) -> None:
    patch.setattr(gc, "FLOOR", 0)


def believe_only_what_is_published(patch: Patch) -> None:
    patch.setattr(candidates, "with_its_pin", lambda _, candidate, __: candidate)


def judge_what_was_gone_back_to(patch: Patch) -> None:
    patch.setattr(reader, "gone_back_to", lambda _: None)


def order_by_step(patch: Patch) -> None:
    before = candidates._newest_first

    def newest_first(folders: Any) -> Any:
        return tuple(sorted(before(folders), key=lambda name: (name.step, name.attempt), reverse=True))

    patch.setattr(candidates, "_newest_first", newest_first)


class _AlwaysFirst(WrappingStore):
    """Overwrites what is there, and says that nothing was."""

    def create(self, path: str, data: bytes) -> bool:
        self.inner.replace(path, data)
        return True


def claim_without_asking(patch: Patch) -> None:
    claim = opening.claim
    patch.setattr(opening, "claim", lambda store, **rest: claim(_AlwaysFirst(store), **rest))


def no_look_after_the_claim(patch: Patch) -> None:
    look, seen = opening.look, weakref.WeakKeyDictionary[Any, Any]()

    def once(store: Any) -> Any:
        if store not in seen:
            seen[store] = look(store)
        return seen[store]

    patch.setattr(opening, "look", once)


def an_error_is_none(patch: Patch) -> None:
    read = candidates.read_candidate

    def hopeful(store: Any, name: Any) -> Any:
        try:
            return read(store, name)
        except StorageUnavailable:
            return Candidate(name=name)

    patch.setattr(candidates, "read_candidate", hopeful)


def no_history(patch: Patch) -> None:
    patch.setattr(opening, "check_history", lambda *_, **__: None)


def what_is_gone_stops_the_start(patch: Patch) -> None:
    load = opening.load_chosen

    def load_chosen(*rest: Any, **options: Any) -> Any:
        try:
            return load(*rest, **options)
        except StorageNotFound as error:
            raise StorageError(str(error), path=error.path) from None

    patch.setattr(opening, "load_chosen", load_chosen)


def one_look_is_enough(patch: Patch) -> None:
    def look_and(find: Any, store: Any) -> Any:
        listing = opening.look(store)
        return listing, find(listing)

    patch.setattr(opening, "_look_and", look_and)


def keep_looks(patch: Patch, *, first: bool, second: bool) -> None:
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


def delete_though_superseded(patch: Patch) -> None:
    patch.setattr(publish.PublishOutcome, "may_delete", property(lambda outcome: outcome.published))


def sweep_without_deciding(patch: Patch) -> None:
    def believe(self: Any) -> bool:
        for name in sorted(self.folders):
            if self.is_open(name):
                self.markers[name] = Marker(state=ABANDONED)
        return False

    patch.setattr(cleaning.Cleaning, "decide_all", believe)


def sweep_everybody(patch: Patch) -> None:
    sweep = gc.sweep
    patch.setattr(gc, "sweep", lambda store, *, attempt, **rest: sweep(store, attempt=1 << 40, **rest))


def delete_the_manifest_of_another(patch: Patch) -> None:
    withdraw = cleaning.withdraw

    def as_if_own(store: Any, name: Any, *, attempt: int, in_use: Any) -> Any:
        return withdraw(store, name, attempt=name.attempt, in_use=in_use)

    patch.setattr(cleaning, "withdraw", as_if_own)


def keep_one(patch: Patch) -> None:
    patch.setattr(retention, "FLOOR", 1)


def all_are_healthy(patch: Patch) -> None:
    saved = gc._saved
    patch.setattr(gc, "_saved", lambda manifest: dataclasses.replace(saved(manifest), healthy=True))


def forget_the_origin(patch: Patch) -> None:
    patch.setattr(retention, "_still_needed", lambda *_, **__: False)


def touch_what_was_passed_over(patch: Patch) -> None:
    real = gc.Retention
    patch.setattr(gc, "Retention", lambda **options: real(**{**options, "passed_over": frozenset()}))


def files_first(patch: Patch) -> None:
    withdraw = cleaning.withdraw

    def files_first(store: Any, name: Any, *, attempt: int, in_use: Any) -> Any:
        for path in store.list(name.folder):
            if path.path != name.manifest:
                store.delete(path.path)
        return withdraw(store, name, attempt=attempt, in_use=in_use)

    patch.setattr(cleaning, "withdraw", files_first)


def no_confirmation(patch: Patch) -> None:
    def withdraw(store: Any, name: Any, *, attempt: int, in_use: Any) -> Any:
        marker = Marker(state=RETIRED, in_use=tuple(sorted(in_use)))
        if name.attempt == attempt and not in_use:
            store.delete(name.manifest)
            return None
        store.replace(name.manifest, encode_marker(marker))
        return marker

    patch.setattr(cleaning, "withdraw", withdraw)


def no_obstacle(patch: Patch) -> None:
    patch.setattr(cleaning.Cleaning, "_is_obstructed", lambda *_: False)


def believe_the_first_read(patch: Patch) -> None:
    def read_candidate(store: Any, name: Any) -> Any:
        try:
            return candidates._read_once(store, name)
        except (DamagedCheckpoint, UnsupportedFormat) as error:
            return Candidate(name=name, fault=error)

    patch.setattr(candidates, "read_candidate", read_candidate)


def an_error_is_damage(patch: Patch) -> None:
    load = opening.load_chosen

    def load_chosen(store: Any, choice: Any, *, unusable: Any, **rest: Any) -> Any:
        try:
            return load(store, choice, unusable=unusable, **rest)
        except StorageUnavailable as error:
            unusable[choice.name] = str(error)
            return None

    patch.setattr(opening, "load_chosen", load_chosen)


def health_does_not_matter(patch: Patch) -> None:
    patch.setattr(reader, "_sick", lambda _: "")


def sizes_are_not_asked(patch: Patch) -> None:
    patch.setattr(upload.Uploader, "_confirm", lambda *_: None)


def manifest_first(patch: Patch) -> None:
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


def do_not_look_again(patch: Patch) -> None:
    patch.setattr(cleaning.Cleaning, "_has_grown", lambda _: False)


def refer_without_asking(patch: Patch) -> None:
    patch.setattr(lending.Lender, "_is_there", lambda *_: True)


def delete_what_others_need(patch: Patch) -> None:
    patch.setattr(cleaning.Cleaning, "needed", lambda *_, **__: Needed())


def do_not_ask_who_is_there(patch: Patch) -> None:
    patch.setattr(occupancy.Occupancy, "check", lambda *_: None)


def do_not_ask_who_won_the_claim(patch: Patch) -> None:
    claim = opening.claim
    patch.setattr(opening, "claim", lambda store, **rest: claim(store, **{**rest, "met": lambda _: None}))


def do_not_watch(patch: Patch) -> None:
    in_use = occupancy.in_use
    patch.setattr(occupancy, "in_use", lambda who, **rest: in_use(who, **{**rest, "wait": lambda _: None}))


def whoever_was_there_is_there(patch: Patch) -> None:
    patch.setattr(
        occupancy, "in_use", lambda who, *, identity, **_: who is not None and who.job != identity.job
    )


def nobody_takes_over(patch: Patch) -> None:
    real = protocol.claim_attempt

    def claim_attempt(store: Any, *, options: Any, **rest: Any) -> Any:
        return real(store, options=dataclasses.replace(options, takeover=False), **rest)

    patch.setattr(protocol, "claim_attempt", claim_attempt)


def the_first_record_has_the_last_word(patch: Patch) -> None:
    patch.setattr(attempts, "_marked_run", lambda *_: None)


def believe_the_store(patch: Patch) -> None:
    patch.setattr(opening, "is_exclusive", lambda *_: True)


def sweep_after_the_dead(patch: Patch) -> None:
    patch.setattr(tidying.Tidying, "_may_delete", lambda *_: gc.anything)


def clean_up_after_the_dead(patch: Patch) -> None:
    patch.setattr(clearing, "may_delete_by", lambda *_, **__: gc.anything)


def delete_own_failed_saves(patch: Patch) -> None:
    tidy = tidying.Tidying.after_publish

    def tidy_all(self: Any, *rest: Any, **options: Any) -> None:
        for name in [name for name, tried in self._leftovers.items() if tried]:
            gc.discard(self._store, name, manifest_tried=True, on_event=self._emit)
            del self._leftovers[name]
        tidy(self, *rest, **options)

    patch.setattr(tidying.Tidying, "after_publish", tidy_all)


def end_without_a_word_of_failed_saves(patch: Patch) -> None:
    patch.setattr(upload.Uploader, "undecided", False)


def do_not_look_at_the_own_record(patch: Patch) -> None:
    real = publish.publish
    patch.setattr(
        upload, "publish", lambda *rest, **options: real(*rest, **{**options, "single_writer": False})
    )


def try_the_store_by_another_nonce(patch: Patch) -> None:
    encode = claims.encode_record

    def encoded(record: Any) -> bytes:
        trial = record.version.endswith(claims._TRIAL)
        return encode(dataclasses.replace(record, nonce="ffffffff") if trial else record)

    patch.setattr(claims, "encode_record", encoded)


def overlook_pins(patch: Patch, *, blind: Callable[[int], bool]) -> None:
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


def pin_without_a_second_look(patch: Patch) -> None:
    read = pins._read_manifest
    seen = weakref.WeakKeyDictionary[Any, dict[Any, bytes]]()

    def once(store: Any, name: Any) -> bytes:
        known = seen.setdefault(store, {})
        if name not in known:
            known[name] = read(store, name)
        return known[name]

    patch.setattr(pins, "_read_manifest", once)


def pins_without_a_copy(patch: Patch) -> None:
    patch.setattr(candidates, "pinned_manifest", lambda *_: None)
    patch.setattr(catalog, "pinned_manifest", lambda *_: None)


def pinned_refer_to_nothing(patch: Patch) -> None:
    patch.setattr(cleaning, "pinned_manifests", lambda *_, **__: [])


def trim_what_is_pinned(patch: Patch) -> None:
    trim, look = cleaning.Cleaning.trim, cleaning.pinned

    def blindly(self: Any, *rest: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(cleaning, "pinned", lambda *_, **__: frozenset())
            return trim(self, *rest, **options)

    assert look is pins.pinned
    patch.setattr(cleaning.Cleaning, "trim", blindly)


def an_unreadable_pin_is_none(patch: Patch) -> None:
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


def no_list_of_pins_is_none(patch: Patch) -> None:
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
