"""Bytes: what every rank counts is what the map predicted, row by row, and what the published formulas say."""

from fractions import Fraction

import certificate_workers as workers
import pytest
from helpers_math import quick
from hypothesis import given
from hypothesis import strategies as st

from distmuon.sharding.collectives import Group
from distmuon.sharding.gradients import STATISTICS_LABEL
from distmuon.sharding.layout import ITEM_BYTES, Layout, ParamSpec, plan
from distmuon.sharding.ledger import NOTHING, Ledger, Traffic
from distmuon.verify.prediction import predict_step
from distmuon.verify.training import predict_run

every_grid = pytest.mark.parametrize(("dp", "tp"), workers.GRIDS)
every_case = pytest.mark.parametrize("name", workers.CASES)


def predicted_here(name: str, dp: int, tp: int, rank: int) -> Ledger:
    """Predict a case in this process, on a grid that does not exist here."""
    return workers.CASES[name](Group("tp", tp)).predict(dp, tp, rank)


# ---- Counted on real worlds -------------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "tp", "name"), workers.on_grids(workers.EVERY))
def test_a_training_run_sends_what_was_predicted(dp: int, tp: int, name: str) -> None:
    for rank, witness in enumerate(workers.witnesses(dp, tp)):
        prediction = predict_run(workers.EVERY[name], dp, tp, rank)
        assert witness.trained[name].differences(prediction) == [], f"rank {rank}"
        groups = {"dp": dp, "tp": tp, "world": dp * tp}
        assert {entry.group for entry, _ in prediction} == {group for group, size in groups.items() if size > 1}


@every_grid
@every_case
def test_one_step_sends_what_was_predicted_by_whoever_predicts_it_and_the_dispatcher_saw_it(
    dp: int, tp: int, name: str
) -> None:
    """On gloo our reduce-scatter is an all-to-all and a local sum, which is what the dispatcher sees."""
    for rank, witness in enumerate(workers.witnesses(dp, tp)):
        counted, dispatched, predicted_there = witness.cases[name]
        assert counted.differences(predicted_there) == [], f"rank {rank}"
        assert predicted_there == predicted_here(name, dp, tp, rank)
        assert (counted.total().sent_bytes > 0) == (dp * tp > 1)
        expected: dict[tuple[str, str], Traffic] = {}
        for (op, group), traffic in counted.by_collective().items():
            seen_as = ("all_to_all" if op == "reduce_scatter" else op, group)
            expected[seen_as] = expected.get(seen_as, NOTHING).plus(traffic)
        assert dispatched.by_collective() == expected, f"rank {rank}"


@every_grid
def test_heads_that_tp_does_not_cut_send_nothing_over_tp(dp: int, tp: int) -> None:
    for witness in workers.witnesses(dp, tp):
        for name in ("heads alone, owner", "several matrices, blockwise"):
            assert witness.cases[name][0].total(group="tp").sent_bytes == 0
    ledgers = [witness.cases["several matrices"][0] for witness in workers.witnesses(dp, tp)]
    for name, cut in {"experts": False, "output": False, "heads of qkv": False, "qkv": True, "plain": True}.items():
        assert any(ledger.total(label=f"momentum, {name}").sent_bytes for ledger in ledgers) == (cut and tp > 1), name


@pytest.mark.parametrize(("dtype", "ratio"), [("", Fraction(5, 4)), (", bf16", Fraction(4, 3))])
def test_without_tp_and_padding_gather_all_costs_exactly_the_published_ratio(dtype: str, ratio: Fraction) -> None:
    for witness in workers.witnesses(4, 1):
        muon, adamw = (witness.cases[f"squares{dtype}{other}"][0] for other in ("", ", adamw"))
        assert Fraction(*(sent_for_matrices(ledger) for ledger in (muon, adamw))) == ratio


def sent_for_matrices(ledger: Ledger) -> int:
    return ledger.total().sent_bytes - ledger.total(label=STATISTICS_LABEL).sent_bytes


# ---- Predicted, against the formulas ----------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int, str]:
    """Draw a map of matrices without padding, T, and the dtype in which momentum travels."""
    dp, tp = draw(st.integers(1, 64)), draw(st.integers(1, 16))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    cut = draw(st.sampled_from([0, 1]))
    specs = []
    for position in range(draw(st.integers(1, 8))):
        rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
        shape = (rows * dp, columns) if draw(st.booleans()) else (rows, columns * dp)
        specs.append(ParamSpec(f"w{position}", shape, dtype, cut if tp > 1 else None))
    layout = plan(specs, dp, draw(st.sampled_from([1, 50, 1000, 10**9])))
    assert all(bucket.padded == bucket.numel for bucket in layout.buckets)
    return layout, tp, draw(st.sampled_from(["float32", "bfloat16"]))


@given(layouts())
@quick(80)
def test_predictions_are_the_closed_formulas_where_nothing_is_padded(drawn: tuple[Layout, int, str]) -> None:
    """Sums over DP ranks: AdamW (D-1) n (g+w), gather_all (D-1) n (g+w+m) + (T-1) m n s."""
    layout, tp, gather_dtype = drawn
    d, n = layout.dp, sum(spec.numel for spec in layout.specs)
    g, w, m = 4, ITEM_BYTES[layout.specs[0].dtype], ITEM_BYTES[gather_dtype]
    touched = 0  # n s: elements, each counted once per DP rank that owns any of its matrix
    for bucket in layout.buckets:
        for index in bucket.params:
            where = layout.global_ranges[index].relative_to(bucket.offset)
            touched += len({at // bucket.shard_size for at in range(*where)}) * layout.specs[index].numel
    everything = range(len(layout.specs))
    muon = [predict_step(layout, tp, rank, everything, gather_dtype=gather_dtype) for rank in range(d)]
    adamw = [predict_step(layout, tp, rank) for rank in range(d)]
    assert sum(sent_for_matrices(ledger) for ledger in adamw) == (d - 1) * n * (g + w)
    assert sum(ledger.total(group="dp").sent_bytes for ledger in muon) == (d - 1) * n * (g + w + m)
    assert sum(ledger.total(group="tp").sent_bytes for ledger in muon) == (tp - 1) * m * touched
    assert n <= touched <= d * n
