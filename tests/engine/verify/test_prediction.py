"""Bytes: what every rank counts is what the map predicted, row by row, and what the published formulas say."""

from fractions import Fraction
from functools import partial

import certificate_workers as workers
import pytest
import torch
from helpers_math import quick
from hypothesis import given
from hypothesis import strategies as st

from distmuon.optim.strategies import gather_all
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
def test_one_step_sends_what_was_predicted_by_whoever_predicts_it(dp: int, tp: int, name: str) -> None:
    for rank, witness in enumerate(workers.witnesses(dp, tp)):
        counted, _, predicted_there = witness.cases[name]
        assert counted.differences(predicted_there) == [], f"rank {rank}"
        assert predicted_there == predicted_here(name, dp, tp, rank)
        assert (counted.total().sent_bytes > 0) == (dp * tp > 1)


@every_grid
@every_case
def test_the_dispatcher_saw_the_same_bytes(dp: int, tp: int, name: str) -> None:
    """On gloo our reduce-scatter is an all-to-all and a local sum, which is what the dispatcher sees."""
    for rank, witness in enumerate(workers.witnesses(dp, tp)):
        counted, dispatched, _ = witness.cases[name]
        for group in ("dp", "tp", "world"):
            ours, seen = counted.total(group=group), dispatched.total(group=group)
            assert ours.sent_bytes == seen.sent_bytes, f"rank {rank}, {group}"
        expected: dict[tuple[str, str], Traffic] = {}
        for (op, group), traffic in counted.by_collective().items():
            seen_as = ("all_to_all" if op == "reduce_scatter" else op, group)
            expected[seen_as] = expected.get(seen_as, NOTHING).plus(traffic)
        assert dispatched.by_collective() == expected, f"rank {rank}"


@every_grid
def test_heads_that_tp_does_not_cut_send_nothing_over_tp(dp: int, tp: int) -> None:
    for witness in workers.witnesses(dp, tp):
        for name in ("heads alone", "heads alone, owner", "several matrices, blockwise"):
            assert witness.cases[name][0].total(group="tp").sent_bytes == 0
    ledgers = [witness.cases["several matrices"][0] for witness in workers.witnesses(dp, tp)]
    for name, cut in {"experts": False, "output": False, "heads of qkv": False, "qkv": True, "plain": True}.items():
        assert any(ledger.total(label=f"momentum, {name}").sent_bytes for ledger in ledgers) == (cut and tp > 1), name


def test_the_cases_hold_what_they_are_meant_to_hold() -> None:
    def padding(name: str, dp: int, tp: int = 1) -> list[int]:
        return [bucket.padded - bucket.numel for bucket in workers.CASES[name](Group("tp", tp)).layout(dp).buckets]

    ragged = workers.CASES["ragged"](Group("tp")).layout(8)
    assert len(ragged.buffers) == 3
    assert max(len(buffer.buckets) for buffer in ragged.buffers) > 1
    assert sum(map(bool, padding("ragged", 8))) > 2
    assert any(bucket.shard(7).start >= bucket.offset + bucket.numel for bucket in ragged.buckets)  # owns nothing
    assert sum(padding("mlp", 8)) > 0
    assert len(padding("transformer", 8)) > 1
    assert sum(padding("squares", 8)) == 0
    labels = {entry.label for entry, _ in predicted_here("transformer", 2, 4, 0)}
    assert {STATISTICS_LABEL, "blocks.0.query", "blocks.1.down", "momentum, blocks.0.up.weight"} <= labels


@pytest.mark.parametrize("dp", [2, 4, 8])
@pytest.mark.parametrize(("dtype", "ratio"), [("", Fraction(5, 4)), (", bf16", Fraction(4, 3))])
def test_without_tp_and_padding_gather_all_costs_exactly_the_published_ratio(dp, dtype, ratio) -> None:
    for witness in workers.witnesses(dp, 1):
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


@pytest.mark.parametrize("dp", [2, 3, 8, 32])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_matrix_that_every_rank_touches_costs_the_tp_term_in_full(dp: int, tp: int) -> None:
    """One matrix over all shards: s = D. One matrix per shard: s = 1. The published range, at both its ends."""
    spread = plan([ParamSpec("w", (dp, 6), "float32", 1)], dp)
    apart = plan([ParamSpec(f"w{rank}", (2, 3), "float32", 1) for rank in range(dp)], dp)
    for layout, s in ((spread, dp), (apart, 1)):
        n = sum(spec.numel for spec in layout.specs)
        for rank in range(dp):
            ledger = predict_step(layout, tp, rank, range(len(layout.specs)))
            assert ledger.total(group="tp").sent_bytes * dp == (tp - 1) * 2 * n * s


def test_one_view_of_a_thousand_by_eight_ranks_is_predicted_without_any_of_them() -> None:
    shapes = [((2048, 512), 1), ((512, 2048), 1), ((1408, 2048), 0), ((2048, 1408), 1)]
    specs = [
        ParamSpec(f"layers.{layer}.{position}", shape, "bfloat16", dim)
        for layer in range(48)
        for position, (shape, dim) in enumerate(shapes)
    ]
    layout = plan(specs, 1024)
    n, f = sum(spec.numel for spec in specs), Fraction(1023, 1024)
    everything = range(len(specs))
    for rank in (0, 517, 1023):
        ledger = predict_step(layout, 8, rank, everything)
        assert ledger == predict_step(plan(specs, 1024), 8, rank, everything)
        assert ledger.total(group="dp").sent_bytes == f * n * (4 + 2 + 2)
        owned = [layout.specs[i] for b in layout.buckets for i in b.params if rank in layout.owners(b, i)]
        assert ledger.total(group="tp").sent_bytes == 7 * 2 * sum(spec.numel for spec in owned)
    assert not torch.distributed.is_initialized()


# ---- The comparison can fail ------------------------------------------------------------------------------


def test_a_wrong_prediction_differs_from_what_was_counted(monkeypatch) -> None:
    counted = workers.witnesses(2, 2)[0].cases["ragged"][0]
    wrong = {
        "the other DP rank": partial(predicted_here, "ragged", 2, 2, 2),
        "another D": partial(predicted_here, "ragged", 4, 2, 0),
        "another T": partial(predicted_here, "ragged", 2, 4, 0),
        "AdamW": partial(predicted_here, "ragged, adamw", 2, 2, 0),
    }
    for what, predict in wrong.items():
        assert counted != predict(), what
    monkeypatch.setattr(gather_all, "COSTS", gather_all.COSTS._replace(sends=lambda *given: None))
    missing = counted.differences(predicted_here("ragged", 2, 2, 0))
    assert missing
    assert all("momentum" in line for line in missing)
