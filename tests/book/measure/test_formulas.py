"""Closed formulas: with what they leave out they are the prediction; and the report's run is planned as it was."""

from dataclasses import replace
from fractions import Fraction

import pytest

from distmuon.sharding.layout import ITEM_BYTES, ParamSpec, plan
from distmuon.verify.prediction import predict_step
from muonbook.ch12.byte_counts import DTYPES, GRIDS, M, shapes_on
from muonbook.measure import formulas, reported
from muonbook.measure.workload import SHAPES


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_formula_and_what_stands_beside_it_are_the_prediction(dp: int, tp: int) -> None:
    """Padding, AdamW's parameters and norms: nothing else, to the last byte, means over DP ranks."""
    for workload in shapes_on(dp, tp).values():
        for change in DTYPES.values():
            job = replace(workload, **change)
            layout, muon, _ = job.plan(dp, tp)
            n = sum(layout.specs[index].numel for index in muon)
            w, m, s = ITEM_BYTES[job.dtype], M[job.gather_dtype], formulas.mean_owners(layout, muon)
            ours = [predict_step(layout, tp, rank, muon, gather_dtype=job.gather_dtype) for rank in range(dp)]
            adamw = [predict_step(layout, tp, rank) for rank in range(dp)]
            beside_muon = sum(formulas.beside(layout, tp, muon, m).values())
            beside_adamw = sum(formulas.beside(layout, tp, muon).values())
            assert formulas.gather_all_muon(dp, tp, n, 4, w, m, s) + beside_muon == formulas.mean_sent(ours)
            assert formulas.zero1_adamw(dp, n, 4, w) + beside_adamw == formulas.mean_sent(adamw)
            assert 1 <= s <= dp


def test_ddp_sends_what_zero1_sends() -> None:
    for dp in (1, 2, 3, 8, 1024):
        assert formulas.ddp_adamw(dp, 1000, 4) == formulas.zero1_adamw(dp, 1000, 4, 4)


@pytest.mark.parametrize(
    ("sizes", "known"), [((4, 4, 2), Fraction(5, 4)), ((4, 2, 2), Fraction(4, 3)), ((2, 2, 2), Fraction(3, 2))]
)
def test_without_tp_the_ratio_is_the_published_one_on_every_grid(sizes: tuple[int, int, int], known: Fraction) -> None:
    assert {formulas.ratio(dp, 1, *sizes, s) for dp in (2, 3, 64) for s in (1, 2)} == {known}


def test_the_ratio_is_the_quotient_of_the_two_formulas() -> None:
    for dp, tp, s in ((2, 2, Fraction(3, 2)), (4, 2, 1), (3, 5, 3)):
        quotient = formulas.gather_all_muon(dp, tp, 77, 4, 2, 2, s) / formulas.zero1_adamw(dp, 77, 4, 2)
        assert formulas.ratio(dp, tp, 4, 2, 2, s) == quotient


def test_what_has_no_value_is_refused() -> None:
    with pytest.raises(ValueError, match="AdamW sends nothing"):
        formulas.ratio(1, 8, 4, 4, 2, 1)
    with pytest.raises(ValueError, match="no parameter of this map goes to Muon"):
        formulas.mean_owners(plan([ParamSpec("w", (4, 4), "float32")], 2), [])


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
