"""The real code without one of its rules, rule by rule: what a search must find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from spotsafe.testing.schedules import Scenario
from tests.protocol import scenarios, switches
from tests.protocol.switches import Patch


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


NO_FAULTS = dict.fromkeys(scenarios.FAULTS, 0) | {"blind": 0}
LATE = NO_FAULTS | {"kill-late": 2, "late": 3, "fail": 6}
"""What an attempt on a store that ignores conditions has to fear of itself and of those before it."""

MUTATIONS = {
    "1: the newest is the one with the most steps": Mutation(
        rule="1",
        off=switches.order_by_step,
        scenario=scenarios.with_a_past,
        finds="resumes from",
        faults=NO_FAULTS,
    ),
    "2: a claim overwrites another": Mutation(
        rule="2",
        off=switches.claim_without_asking,
        scenario=scenarios.from_nothing,
        finds="is written again",
        faults=NO_FAULTS,
    ),
    "2: no look after the claim": Mutation(
        rule="2",
        off=switches.no_look_after_the_claim,
        scenario=scenarios.from_nothing,
        finds="was there when",
        faults=NO_FAULTS,
    ),
    "3: a manifest that cannot be read is none": Mutation(
        rule="3",
        off=switches.an_error_is_none,
        scenario=scenarios.from_nothing,
        finds="was there when",
        faults=NO_FAULTS | {"fail": 4},
    ),
    "3: fresh although somebody has published": Mutation(
        rule="3",
        off=switches.no_history,
        scenario=scenarios.with_a_past,
        finds="resumes from None",
        faults=NO_FAULTS | {"blind": 2},
    ),
    "3: a file that is gone stops the start": Mutation(
        rule="3",
        off=switches.what_is_gone_stops_the_start,
        scenario=scenarios.from_nothing,
        finds="ends by StorageError",
        faults=NO_FAULTS,
    ),
    "3: nothing can be chosen, says one look": Mutation(
        rule="3",
        off=switches.one_look_is_enough,
        scenario=scenarios.from_nothing,
        finds="ends by NoUsableCheckpoint",
        faults=NO_FAULTS,
    ),
    "4: no look before the manifest": Mutation(
        rule="4",
        off=lambda patch: switches.keep_looks(patch, first=False, second=True),
        scenario=scenarios.two,
        finds="goes on",
        faults=NO_FAULTS | {"fail": 4},
    ),
    "4: no look behind the manifest": Mutation(
        rule="4",
        off=lambda patch: switches.keep_looks(patch, first=True, second=False),
        scenario=scenarios.two_and_a_bad_disk,
        finds="which attempt . resumed from",
        faults=NO_FAULTS,
    ),
    "4: delete whoever is the newest": Mutation(
        rule="4",
        off=switches.delete_though_superseded,
        scenario=scenarios.with_a_past,
        finds="gone|resumed from|is published, and|goes back",
        faults=NO_FAULTS,
    ),
    "4: the manifest before the index": Mutation(
        rule="4",
        off=switches.manifest_first,
        scenario=scenarios.from_nothing,
        finds="is published, and",
        faults=NO_FAULTS,
    ),
    "5: sweep without deciding the name": Mutation(
        rule="5",
        off=switches.sweep_without_deciding,
        scenario=scenarios.from_nothing,
        finds="is published, and",
        faults=NO_FAULTS,
    ),
    "5: sweep what newer attempts write": Mutation(
        rule="5",
        off=switches.sweep_everybody,
        scenario=scenarios.two,
        finds="a save of . fails: StorageNotFound|is the newest",
        faults=NO_FAULTS,
    ),
    "5: delete the manifest of another attempt": Mutation(
        rule="5",
        off=switches.delete_the_manifest_of_another,
        scenario=scenarios.two,
        finds="is published, and",
        faults=NO_FAULTS | {"lost": 1},
    ),
    "5: delete what others refer to": Mutation(
        rule="5",
        off=switches.delete_what_others_need,
        scenario=scenarios.lending,
        finds="is published, and",
        faults=NO_FAULTS,
    ),
    "5: delete by a look that has grown old": Mutation(
        rule="5",
        off=switches.do_not_look_again,
        scenario=scenarios.cleaning,
        finds="is published, and",
        faults=NO_FAULTS,
    ),
    "6: refer without asking for the size": Mutation(
        rule="6",
        off=switches.refer_without_asking,
        scenario=scenarios.lending,
        finds="is published, and",
        faults=NO_FAULTS,
    ),
    "7: one checkpoint is enough": Mutation(
        rule="7",
        off=switches.keep_one,
        scenario=scenarios.with_a_past,
        finds="resumed from|goes back",
        faults=NO_FAULTS,
    ),
    "7: unhealthy ones count": Mutation(
        rule="7",
        off=switches.all_are_healthy,
        scenario=scenarios.ailing,
        finds="resumed from|goes back",
        faults=NO_FAULTS,
    ),
    "7: the origin may go": Mutation(
        rule="7",
        off=switches.forget_the_origin,
        scenario=scenarios.ill_from_birth,
        finds="resumed from",
        faults=NO_FAULTS,
    ),
    "7: what was passed over may go": Mutation(
        rule="7",
        off=switches.touch_what_was_passed_over,
        scenario=scenarios.with_a_past,
        finds="passed over",
        faults=NO_FAULTS,
    ),
    "7: files before manifests": Mutation(
        rule="7",
        off=switches.files_first,
        scenario=scenarios.with_a_past,
        finds="is published, and",
        faults=NO_FAULTS,
    ),
    "7: not confirmed": Mutation(
        rule="7",
        off=switches.no_confirmation,
        scenario=scenarios.with_a_past,
        finds="is published, and",
        faults=NO_FAULTS | {"lie": 1},
    ),
    "7: delete beside a newer attempt": Mutation(
        rule="7",
        off=switches.no_obstacle,
        scenario=scenarios.with_a_past,
        finds="resumed from|goes back",
        faults=NO_FAULTS,
    ),
    "8: the first read is believed": Mutation(
        rule="8",
        off=switches.believe_the_first_read,
        scenario=scenarios.with_a_past,
        finds="was there when",
        faults=NO_FAULTS | {"wrong": 2},
    ),
    "8: a storage error is damage": Mutation(
        rule="8",
        off=switches.an_error_is_damage,
        scenario=scenarios.two_and_a_bad_disk,
        finds="was there when",
        faults=NO_FAULTS | {"fail": 4},
    ),
    "9: health does not matter": Mutation(
        rule="9",
        off=switches.health_does_not_matter,
        scenario=scenarios.ailing,
        finds="was there when",
        faults=NO_FAULTS,
    ),
    "10: go back without a pin": Mutation(
        rule="10",
        off=switches.go_back_without_a_pin,
        scenario=scenarios.going_back_to_an_older_one,
        finds="goes back|resumed from",
        faults=NO_FAULTS,
    ),
    "10: the next record forgets it": Mutation(
        rule="10",
        off=switches.forget_the_rollbacks,
        scenario=scenarios.going_back_to_an_older_one,
        finds="forgets|resumes from",
        faults=NO_FAULTS,
    ),
    "10: the rollbacks are those of the look": Mutation(
        rule="10",
        off=switches.claim_by_the_rollbacks_of_the_look,
        scenario=scenarios.going_back_to_an_older_one,
        finds="forgets",
        faults=NO_FAULTS,
    ),
    "10: what was set aside is resumed from": Mutation(
        rule="10",
        off=switches.nothing_is_set_aside,
        scenario=scenarios.going_back_to_an_older_one,
        finds="set aside",
        faults=NO_FAULTS,
    ),
    "10: what was set aside is counted": Mutation(
        rule="10",
        off=switches.count_what_is_set_aside,
        scenario=scenarios.going_back_to_an_older_one,
        finds="set aside",
        faults=NO_FAULTS,
    ),
    "10: a second rollback adds to the first": Mutation(
        rule="10",
        off=switches.add_to_the_present_rollbacks,
        scenario=scenarios.going_back_and_forth,
        finds="does not count",
        faults=NO_FAULTS,
    ),
    "10: its pin goes at once": Mutation(
        rule="10",
        off=switches.let_go_of_what_was_gone_back_to,
        scenario=scenarios.going_back_to_an_older_one,
        finds="lets go",
        faults=NO_FAULTS,
    ),
    "10: its pin does not count": Mutation(
        rule="10",
        off=switches.believe_only_what_is_published,
        scenario=scenarios.going_back_to_an_older_one,
        finds="was there when|NoUsableCheckpoint",
        faults=NO_FAULTS,
    ),
    "10: what was gone back to is judged": Mutation(
        rule="10",
        off=switches.judge_what_was_gone_back_to,
        scenario=scenarios.going_back_and_forth,
        finds="was there when",
        faults=NO_FAULTS,
    ),
    "11: nobody is asked for": Mutation(
        rule="11",
        off=switches.do_not_ask_who_is_there,
        scenario=scenarios.two_jobs,
        finds="of another job and alive",
        faults=NO_FAULTS,
    ),
    "11: nobody is asked for after a lost claim": Mutation(
        rule="11",
        off=switches.do_not_ask_who_won_the_claim,
        scenario=scenarios.two_jobs,
        finds="of another job and alive",
        faults=NO_FAULTS,
    ),
    "11: a heart is looked at and not watched": Mutation(
        rule="11",
        off=switches.do_not_watch,
        scenario=scenarios.two_jobs,
        finds="of another job and alive",
        faults=NO_FAULTS,
    ),
    "11: who is dead keeps others out": Mutation(
        rule="11",
        off=switches.whoever_was_there_is_there,
        scenario=scenarios.two_jobs,
        finds="ends by RunInUse",
        faults=NO_FAULTS,
    ),
    "11: takeover is not asked for": Mutation(
        rule="11",
        off=switches.nobody_takes_over,
        scenario=scenarios.taking_over,
        finds="takes over, and ends by RunInUse",
        faults=NO_FAULTS,
    ),
    "4: delete though taken over": Mutation(
        rule="4",
        off=switches.delete_though_superseded,
        scenario=scenarios.taking_over,
        finds="gone|resumed from|is published, and|goes back",
        faults=NO_FAULTS,
    ),
    "12: the run's id is what the first record says": Mutation(
        rule="12",
        off=switches.the_first_record_has_the_last_word,
        scenario=scenarios.one_after_the_other_from_nothing,
        finds="NoUsableCheckpoint",
        faults=LATE,
    ),
    "12: gc cleans up after the dead": Mutation(
        rule="12",
        off=switches.clean_up_after_the_dead,
        scenario=scenarios.cleaning_without_conditions,
        finds="is published, and",
        faults=LATE,
    ),
    "12: the store is believed": Mutation(
        rule="12",
        off=switches.believe_the_store,
        scenario=scenarios.one_after_the_other,
        finds="is published, and|goes on",
        faults=LATE,
    ),
    "12: sweep what a dead attempt was writing": Mutation(
        rule="12",
        off=switches.sweep_after_the_dead,
        scenario=scenarios.one_after_the_other,
        finds="is published, and",
        faults=LATE,
    ),
    "12: delete a save whose manifest may arrive": Mutation(
        rule="12",
        off=switches.delete_own_failed_saves,
        scenario=scenarios.one_after_the_other,
        finds="is published, and",
        faults=LATE,
    ),
    "12: an end without a word of such a save": Mutation(
        rule="12",
        off=switches.end_without_a_word_of_failed_saves,
        scenario=scenarios.one_after_the_other,
        finds="is published, and",
        faults=LATE,
    ),
    "12: no look at the own record": Mutation(
        rule="12",
        off=switches.do_not_look_at_the_own_record,
        scenario=scenarios.one_after_the_other_from_nothing,
        finds="goes on",
        faults=LATE,
    ),
    "12: a trial takes the own record away": Mutation(
        rule="12",
        off=switches.try_the_store_by_another_nonce,
        scenario=scenarios.one_after_the_other,
        finds="ends as superseded, and is the newest",
        faults=NO_FAULTS | {"lie": 1, "late": 1},
    ),
    "pins: no look before the first manifest": Mutation(
        rule="pins",
        off=lambda patch: switches.overlook_pins(patch, blind=lambda look: look == 1),
        scenario=scenarios.one_reader,
        finds="has pinned before",
        faults=NO_FAULTS,
    ),
    "pins: no look before the first file": Mutation(
        rule="pins",
        off=lambda patch: switches.overlook_pins(patch, blind=lambda look: look == 2),
        scenario=scenarios.one_reader,
        finds="is pinned by",
        faults=NO_FAULTS,
        every=True,
    ),
    "pins: the reader does not look again": Mutation(
        rule="pins",
        off=switches.pin_without_a_second_look,
        scenario=scenarios.one_reader,
        finds="is pinned by|ends by CheckpointNotFound",
        faults=NO_FAULTS,
        every=True,
    ),
    "pins: no copy of the manifest": Mutation(
        rule="pins",
        off=switches.pins_without_a_copy,
        scenario=scenarios.one_reader,
        finds="ends by CheckpointNotFound",
        faults=NO_FAULTS,
        every=True,
    ),
    "pins: what a pinned one refers to may go": Mutation(
        rule="pins",
        off=switches.pinned_refer_to_nothing,
        scenario=scenarios.one_reader,
        finds="is pinned by",
        faults=NO_FAULTS,
        every=True,
    ),
    "pins: what is left of a pinned one may go": Mutation(
        rule="pins",
        off=switches.trim_what_is_pinned,
        scenario=scenarios.a_reader_of_what_is_lent,
        finds="is pinned by",
        faults=NO_FAULTS,
        every=True,
    ),
    "pins: one that cannot be read keeps nothing": Mutation(
        rule="pins",
        off=switches.an_unreadable_pin_is_none,
        scenario=scenarios.one_reader,
        finds="is pinned by|has pinned before",
        faults=NO_FAULTS | {"wrong": 3},
    ),
    "pins: that cannot be listed are none": Mutation(
        rule="pins",
        off=switches.no_list_of_pins_is_none,
        scenario=scenarios.one_reader,
        finds="is pinned by|has pinned before",
        faults=NO_FAULTS | {"fail": 4},
    ),
    "13: what was acknowledged is there": Mutation(
        rule="13",
        off=switches.sizes_are_not_asked,
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
    "12: gc does not try a store by the name of a manifest": (
        "the search finds a published one withdrawn, but after 600 schedules; tests/cli/test_gc.py shows it at once"
    ),
    "12: the session says so": "no promise about checkpoints; tests/session",
    "13: durable": "a store in memory forgets nothing; tests/storage loses what was not synced",
    "13: the sweep after the first publish": "what is not swept is garbage, and breaks no promise",
}
"""What else the rules of docs/DESIGN.md say, and why no search is made without it."""
