"""MuonW planned by kinds and arrays is MuonW's own plan, piece by piece, and what torch's dispatcher counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import planner_workers
import pytest
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from distmuon import launch
from distmuon.optim.exchange_plan import ExchangePlan, ShardedParam
from distmuon.optim.muonw import HEADER
from distmuon.sharding.boxes import all_of, boxes, volume
from distmuon.sharding.layout import DEFAULT_BUCKET_SIZE, ParamSpec, plan
from distmuon.verify.model_states import predict_rows
from muonbook.measure.workload import Workload
from muonbook.planner.fabrics import FABRICS
from muonbook.planner.measured.timed_worlds import FLOAT32
from muonbook.planner.parts.fsdp_worlds import FsdpPart
from muonbook.planner.planned_worlds import MOMENTUM_BYTES

MESHES = [(5, 1), (3, 2), (2, 4), (1, 1)]
SHAPES = [  # whole, and the dimension that TP cuts
    ((24, 16), 0), ((16, 24), 1), ((24, 16), 0), ((40, 8), 0), ((6, 16), None), ((16, 16), 1), ((1, 8), None),
    ((3, 40), None), ((16, 16), 0),
]  # fmt: skip


def specs(tp: int) -> list[ParamSpec]:
    found = []
    for number, (shape, cut) in enumerate(SHAPES):
        local = tuple(n // tp if dim == cut else n for dim, n in enumerate(shape))
        found.append(ParamSpec(f"matrix {number}", local, "float32", cut))
    return [*found, ParamSpec("norm", (16,), "float32")]


def placements(cut: int | None, tp: int) -> list[Any]:
    """Return how FSDP2 over TP places a weight, as DTensor writes it down."""
    if cut is None:
        return [Shard(0), Replicate()]
    return [_StridedShard(0, split_factor=tp), Shard(0)] if cut == 0 else [Shard(0), Shard(1)]


def part(dp: int, tp: int) -> FsdpPart:
    every = specs(tp)
    return FsdpPart(every, frozenset(range(len(SHAPES))), dp, tp, ["a"] * 4 + ["b"] * 4 + ["", ""], dtypes=FLOAT32)


@pytest.mark.parametrize("bucket_size", [DEFAULT_BUCKET_SIZE, 200])
@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_parcels_are_counted_without_being_packed(dp: int, tp: int, bucket_size: int) -> None:
    planned, ranks = replace(part(dp, tp), bucket_size=bucket_size), dp * tp
    assert (len(planned.waves) > 1) == (bucket_size == 200)
    placed = [
        ShardedParam(boxes(shape, (dp, tp), placements(cut, tp)), [(all_of(shape), (shape[0], shape[1]))])
        for shape, cut in SHAPES
    ]
    moves = planned.exchanged()
    for rank in range(ranks):
        waves, loads = list[ExchangePlan](), list[float]()
        for wave in planned.waves:
            waves.append(ExchangePlan([placed[index] for index in wave], ranks, rank, loads))
            loads = waves[-1].loads
        found = {
            i: real.owner[n, 0] for real, wave in zip(waves, planned.waves, strict=True) for n, i in enumerate(wave)
        }
        assert found == planned.owners
        for which, amounts, header in zip(("out", "back"), moves, (HEADER * (ranks - 1), 0), strict=True):
            parcels = [sent for real in waves for to, sent in enumerate(getattr(real, which)) if to != rank]
            sent = sum(volume(piece.box) for pieces in parcels for piece in pieces)
            assert int(amounts[rank]) == (MOMENTUM_BYTES * (sent + header) if ranks > 1 else 0)


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_states_are_rows(dp: int, tp: int) -> None:
    planned = part(dp, tp)
    layout = plan(planned.specs, dp)
    for rank in range(dp):
        alone = predict_rows(layout, rank, planned.muon)
        found = {kind: int(column[rank]) for kind, column in planned.states().items()}
        assert found == alone


@pytest.mark.parametrize(("dp", "tp"), MESHES[:3])
def test_a_step_waits_for_the_slowest_rank_of_each_move(dp: int, tp: int) -> None:
    planned = part(dp, tp)
    (out, back), links, rate = planned.exchanged(), FABRICS["nvlink_ethernet"].links(dp, tp), 1e12
    assert out.max() != back.max()
    waits = len(planned.waves) * (dp * tp - 1) * links["mesh"].alpha_seconds
    assert planned.update_seconds(links, rate) == {
        "momentum": pytest.approx(waits + out.max() / links["mesh"].bytes_per_second),
        "updates": pytest.approx(waits + back.max() / links["mesh"].bytes_per_second),
        "Newton–Schulz": pytest.approx(planned.flops().max() / rate),
    }
    assert planned.flops().max() > planned.flops().mean()
    assert planned.update_bytes == planned.step_bytes().max() > planned.step_bytes().mean()


def test_passes_gather_two_layers_at_most_at_once_and_every_layer_twice() -> None:
    """Layers are gathered before forward and before backward; what is in none, once; gradients leave once."""
    planned, link = replace(part(3, 2), micro_batches=5), FABRICS["nvlink_ethernet"].links(3, 2)["dp"]
    sizes = dict.fromkeys(planned.units, 0)
    for spec, unit in zip(planned.specs, planned.units, strict=True):
        sizes[unit] += -(-spec.shape[0] // 3) * spec.numel // spec.shape[0]
    a, b, rest = sizes["a"], sizes["b"], sizes[""]
    assert planned.passing_bytes == 3 * (a + b + rest - min(sizes.values())) * (4 + 4)  # gathered, and their gradients
    sent = [4 * 2 * (2 * a + 2 * b + rest), 4 * 2 * (a + b + rest)]  # to two others, in float32
    assert [int(amounts.max()) for amounts in list(planned.sent().values())[:2]] == [5 * each for each in sent]
    hops = (5 + 3) * 2 * link.alpha_seconds  # five gathers, three reductions, of two hops each
    assert planned.pass_seconds(link) == pytest.approx(hops + sum(sent) / link.bytes_per_second)


# ---- Counted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "tp"), [(4, 1), (2, 2)])
def test_a_real_step_sends_and_keeps_what_is_planned(dp: int, tp: int) -> None:
    job = Workload(vocabulary=67, width=64, layers=2, heads=4, context=16, sequences=4, bucket_size=20_011)
    baselines = ["adamw", "gather_all", "gather_cut", "owner", *(["muonw"] if tp == 1 else [])]
    for rank in launch.run(planner_workers.facts, (job, baselines), dp=dp, tp=tp):
        for name in baselines:
            found = rank[name]
            assert found["sent"] == found["planned_sent"] == found["in_ledger"], name
            assert found["held"] == found["planned_held"], name
