"""Closed formulas: with what they leave out they are the prediction; and the report's run is planned as it was."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest

from distmuon.sharding.layout import ITEM_BYTES, ParamSpec, plan
from distmuon.sharding.ledger import Ledger
from distmuon.verify.prediction import predict_step
from muonbook.ch12.byte_counts import DTYPES, M
from muonbook.ch12.four_counts import LAYOUTS
from muonbook.measure import formulas, reported
from muonbook.measure.workload import SHAPES


def mean_sent(ledgers: Sequence[Ledger]) -> Fraction:
    return Fraction(sum(ledger.total().sent_bytes for ledger in ledgers), len(ledgers))


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (3, 1), (4, 2)])  # TP alone, uneven cuts, and both
def test_formula_and_what_stands_beside_it_are_the_prediction(dp: int, tp: int) -> None:
    """Padding, AdamW's parameters and norms: nothing else, to the last byte, means over DP ranks."""
    for shape, change in zip(SHAPES.values(), DTYPES.values(), strict=True):
        job = replace(shape.shared_by(dp), **change)
        w, m = ITEM_BYTES[job.dtype], M[job.gather_dtype]
        for way in LAYOUTS.values() if job.fits(dp, tp) else ():
            layout, muon = way.plan(job, dp, tp)
            n, s = sum(layout.specs[index].numel for index in muon), formulas.mean_owners(layout, muon)
            ours = [way.predict_optimizer(job, dp, tp, (d, t)) for d in range(dp) for t in range(tp)]
            zeros = m if way.strategy == "gather_all" else 0
            beside = sum(formulas.beside(layout, tp, muon, zeros).values())
            assert formulas.muon(way.strategy, dp, tp, n, 4, w, m, s) + beside == mean_sent(ours)
            assert 1 <= s <= dp
            adamw = [predict_step(layout, tp, rank) for rank in range(dp)]
            beside_adamw = sum(formulas.beside(layout, tp, muon).values())
            assert formulas.zero1_adamw(dp, n, 4, w) + beside_adamw == mean_sent(adamw)


@pytest.mark.parametrize(
    ("sizes", "known"), [((4, 4, 2), Fraction(5, 4)), ((4, 2, 2), Fraction(4, 3)), ((2, 2, 2), Fraction(3, 2))]
)
def test_without_tp_the_ratio_is_the_published_one_on_every_grid(sizes: tuple[int, int, int], known: Fraction) -> None:
    assert {formulas.ratio("gather_all", dp, 1, *sizes, s) for dp in (2, 3, 64) for s in (1, 2)} == {known}


@pytest.mark.parametrize("dp", [2, 3, 64])
def test_the_published_interval_is_the_range_of_s_where_only_what_is_cut_travels(dp: int) -> None:
    found = [formulas.ratio("gather_cut", dp, 1, 4, 4, 2, s) for s in range(1, dp + 1)]
    assert (found[0], found[-1]) == (1, Fraction(5, 4))
    assert found == sorted(found)
    assert {formulas.ratio("owner", dp, 1, 4, 4, 2, s) for s in (1, dp)} == {1}


def test_a_matrix_alone_in_its_bucket_is_touched_by_all() -> None:
    layout, muon, _ = replace(SHAPES["even"], bucket_size=1).plan(4, 2)
    assert formulas.mean_owners(layout, muon) == 4
    two = plan([ParamSpec("a", (2, 3), "float32"), ParamSpec("b", (2, 3), "float32")], 2)
    assert formulas.mean_owners(two, [0, 1]) == 1


# ---- The report's run -------------------------------------------------------------------------------------


def test_the_reports_collectives_have_the_sizes_that_its_traces_record() -> None:
    """Elements in `record_param_comms` of its public traces: adamw rank 0, and muon dp2 tp2 ranks 0 and 2."""
    assert [a * b for (a, b), _ in reported.MATRICES] == [16777216, 331776, 466944, 592176, 16384]
    layout = reported.plan_model(2, 2)
    (bucket,) = layout.buckets
    assert (bucket.shard_size, bucket.padded) == (4662860, 9325720)
    gathered = []
    for rank in range(2):
        rows = predict_step(layout, 2, rank, range(5))
        gathered.append({t.payload_bytes // 2 for e, t in rows if (e.op, e.group) == ("all_gather", "tp")})
    assert gathered == [{16777216}, {16777216, 331776, 592176, 16384}]


def test_the_reports_bytes() -> None:
    assert reported.all_reduces(4) == 109_106_976
    assert [row.gathers for row in reported.steps(2, 2)] == [26_102_936, 27_043_272]
    assert {Fraction(row.muon, row.adamw) for row in reported.steps(4, 1)} == {Fraction(5, 4)}
    first, second = (row.muon / row.adamw for row in reported.steps(2, 2))
    assert 1.69 < first < second < 1.73


def test_the_reports_model_with_every_algorithm() -> None:
    for dp, tp in ((4, 1), (2, 2)):
        rows = reported.steps(dp, tp)
        mean = sum(row.muon for row in rows) / sum(row.adamw for row in rows)
        assert reported.over_adamw(dp, tp, "gather_all") == pytest.approx(mean)
        cut, owner = (reported.over_adamw(dp, tp, strategy) for strategy in ("gather_cut", "owner"))
        assert 1 <= cut < mean
        assert owner >= 1  # padded: five matrices of three sizes on few ranks
