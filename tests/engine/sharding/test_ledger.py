"""The ledger: the ring formulas, adding up, comparing, and saying where two ledgers differ."""

import pytest
from helpers_math import message

from distmuon.sharding.ledger import CHUNKS_SENT, Entry, Ledger, Traffic, ring_bytes


def step() -> Ledger:
    """One small step on a 4 x 2 grid."""
    ledger = Ledger()
    ledger.record("reduce_scatter", "dp", 4, 4000, "bucket 0")
    ledger.record("all_gather", "dp", 4, 2000, "bucket 0")
    ledger.record("all_gather", "tp", 2, 600, "W1")
    ledger.record("all_gather", "tp", 2, 800, "W2")
    return ledger


def test_by_collective_sums_labels_only() -> None:
    assert step().by_collective() == {
        ("reduce_scatter", "dp"): Traffic(1, 4000, 3000),
        ("all_gather", "dp"): Traffic(1, 2000, 1500),
        ("all_gather", "tp"): Traffic(2, 1400, 700),
    }


@pytest.mark.parametrize(
    ("op", "payload", "ranks", "sent"),
    [
        ("all_gather", 1000, 4, 750),
        ("reduce_scatter", 1000, 4, 750),
        ("all_to_all", 1000, 4, 750),
        ("all_reduce", 1000, 4, 1500),
        ("broadcast", 1000, 4, 750),
        ("all_gather", 1000, 3, 668),  # two chunks of ceil(333.3) bytes
        ("all_reduce", 1000, 3, 1336),
        ("reduce_scatter", 3, 8, 7),  # fewer bytes than ranks: chunks of one byte
        ("all_gather", 0, 8, 0),
        ("all_reduce", 1000, 1, 0),
    ],
)
def test_bytes_sent_follow_the_ring_formula(op: str, payload: int, ranks: int, sent: int) -> None:
    assert ring_bytes(op, payload, ranks) == sent


def test_a_collective_without_a_formula_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'all_gatherr'") as error:
        ring_bytes("all_gatherr", 8, 2)
    assert all(op in message(error) for op in CHUNKS_SENT)
    ledger = Ledger()
    with pytest.raises(ValueError, match="'gossip'"):
        ledger.record("gossip", "dp", 2, 8, "x")
    assert list(ledger) == []


def test_a_group_of_one_sends_nothing_and_leaves_no_row() -> None:
    ledger = Ledger()
    ledger.record("all_gather", "tp", 1, 4096, "W")
    assert list(ledger) == []
    assert ledger == Ledger()


def test_equal_collectives_share_a_row_and_rows_keep_their_order() -> None:
    ledger = step()
    ledger.record("all_gather", "dp", 4, 2000, "bucket 0", calls=2)
    rows = list(ledger)
    assert [entry.label for entry, _ in rows] == ["bucket 0", "bucket 0", "W1", "W2"]
    assert rows[1] == (Entry("all_gather", "dp", "bucket 0"), Traffic(3, 6000, 4500))


def test_totals_sum_the_rows_that_match() -> None:
    ledger = step()
    assert ledger.total() == Traffic(4, 7400, 3000 + 1500 + 300 + 400)
    assert ledger.total(op="all_gather") == Traffic(3, 3400, 2200)
    assert ledger.total(op="all_gather", group="tp") == Traffic(2, 1400, 700)
    assert ledger.total(label="W2") == Traffic(1, 800, 400)
    assert ledger.total(group="world") == Traffic(0, 0, 0)
    assert "4 rows, 5200 bytes" in repr(ledger)


def test_a_step_added_ten_times_is_ten_recorded_steps() -> None:
    predicted, counted = Ledger(), Ledger()
    predicted.add(step(), times=10)
    for _ in range(10):
        counted.add(step())
    assert predicted == counted
    assert predicted.total() == Traffic(40, 74_000, 52_000)


def test_equality_looks_at_rows_and_not_at_their_order() -> None:
    forwards, backwards = step(), Ledger()
    for entry, traffic in reversed(list(step())):
        size = {"dp": 4, "tp": 2}[entry.group]
        backwards.record(entry.op, entry.group, size, traffic.payload_bytes, entry.label)
    assert forwards == backwards
    backwards.record("all_gather", "tp", 2, 600, "W1")
    assert forwards != backwards
    assert forwards != "a ledger"


def test_differences_say_in_which_rows_two_ledgers_disagree() -> None:
    mine, theirs = step(), step()
    assert mine.differences(theirs) == []
    mine.record("all_gather", "tp", 2, 100, "W1")
    theirs.record("broadcast", "world", 8, 80, "loss")
    missing, extra = mine.differences(theirs)
    assert missing.startswith("all_gather over tp (W1): ")
    assert str(Traffic(2, 700, 350)) in missing.split(" against ")[0]
    assert str(Traffic(1, 600, 300)) in missing.split(" against ")[1]
    assert extra.startswith("broadcast over world (loss): ")
    assert str(Traffic(0, 0, 0)) in extra.split(" against ")[0]
