"""When a copy beside training is trusted."""

from __future__ import annotations

from spotsafe.policy.overlap import MOST_THROWN_AWAY, PROBE_EVERY, PROBES_FIRST, OverlapTrust


def trusted() -> OverlapTrust:
    trust = OverlapTrust()
    for _ in range(PROBES_FIRST):
        trust = trust.after_whole()
    return trust


def test_the_first_are_probes_and_then_every_fiftieth() -> None:
    """Training waits for these, so that a write nobody counts is found some time."""
    trust, probes = OverlapTrust(), []
    for number in range(1, 2 * PROBE_EVERY + 1):
        if trust.probes:
            probes.append(number)
        trust = trust.after_whole()
    assert probes == [1, 2, 3, 50, 100]


def test_a_counted_write_is_waited_for() -> None:
    """In a probe it costs nothing else; later it costs the copy."""
    probe = OverlapTrust().after_moved(["a"])
    assert (probe.waits_for, probe.thrown_away, probe.off) == ({"a"}, 0, None)
    later = trusted().after_moved(["b", "c"])
    assert (later.waits_for, later.thrown_away, later.off) == ({"b", "c"}, 1, None)


def test_copies_in_vain_end_the_trust() -> None:
    """After a few of them."""
    trust = trusted()
    for number in range(MOST_THROWN_AWAY):
        assert trust.off is None
        trust = trust.after_moved([str(number)])
    assert trust.off == "3 copies were overtaken by writes"


def test_one_uncounted_write_ends_the_trust() -> None:
    """The next one would not be seen."""
    off = trusted().after_difference({"model.b", "model.a"}).off
    assert off is not None
    assert off.startswith("model.a was written through .data")
