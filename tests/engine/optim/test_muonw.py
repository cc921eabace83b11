"""MuonW: on every mesh to the bit what one process does, in two collectives; and what it cannot take, it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import muonw_workers as work
import part_workers
import pytest
import torch
from helpers_math import gaussian, message
from once import once
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from distmuon import MuonW, launch
from distmuon.optim.exchange_plan import ExchangePlan, ShardedParam, owners
from distmuon.optim.muon import Muon
from distmuon.sharding.boxes import boxes, extent, matrices_of, overlap, volume, within
from distmuon.sharding.layout import Range

MESHES = [
    ("fsdp", 2),
    ("fsdp", 3),
    ("fsdp", 4),
    ("columns", 2),
    ("hybrid", 4),
    ("tp", 4),
    ("tp", 6),
    ("experts", 4),
    ("replicas", 3),
]
on_meshes = pytest.mark.parametrize(("wrap", "ranks"), MESHES)


@once
def facts(wrap: str, ranks: int, dtype: str = "float32") -> list[dict[str, Any]]:
    return launch.run(work.facts, (wrap, dtype), dp=ranks)


# ---- On meshes --------------------------------------------------------------------------------------------


@on_meshes
def test_every_rank_ends_to_the_bit_where_one_process_does(wrap: str, ranks: int) -> None:
    assert [rank["differ"] for rank in facts(wrap, ranks)] == [[]] * ranks


def test_so_it_does_in_float64() -> None:
    assert [rank["differ"] for rank in facts("tp", 4, "float64")] == [[]] * 4


def test_in_bfloat16_it_ends_nearby() -> None:
    """torch rounds a + alpha b in bfloat16 once in a vector and twice in what is left over, so place tells."""
    assert [rank["far"] for rank in facts("tp", 4, "bfloat16")] == [[]] * 4


@on_meshes
def test_a_step_makes_two_collectives_and_one_for_normuon(wrap: str, ranks: int) -> None:
    for rank in facts(wrap, ranks):
        assert rank["calls"] == [3] * work.STEPS
        assert rank["told"] == 3 * work.STEPS


@on_meshes
def test_every_rank_has_what_normuon_keeps_of_every_row(wrap: str, ranks: int) -> None:
    for rank in facts(wrap, ranks):
        assert rank["rows"] == {"experts": True, "kernel": True, "fused": True}


@on_meshes
def test_a_step_waits_for_the_device_once_however_many_ranks_there_are(wrap: str, ranks: int) -> None:
    for looks in launch.run(work.waits, (wrap,), dp=ranks):
        assert looks == ["clip_grad_norm_", "_refuse_different"]


@on_meshes
def test_boxes_are_what_torch_has_put_there(wrap: str, ranks: int) -> None:
    assert [rank["boxes"] for rank in facts(wrap, ranks)] == [[]] * ranks


@on_meshes
def test_every_matrix_has_one_owner(wrap: str, ranks: int) -> None:
    found = [matrix for rank in facts(wrap, ranks) for matrix in rank["mine"]]
    assert sorted(found) == sorted(facts(wrap, ranks)[0]["all"])


@on_meshes
def test_matrices_that_are_taken_in_waves_end_where_all_at_once_do(wrap: str, ranks: int) -> None:
    for rank in launch.run(work.in_waves, (wrap,), dp=ranks):
        assert rank["differ"] == []
        assert 2 < rank["waves"] == (rank["calls"] - 1) / 2
        assert rank["early"]  # one that does not wait is found


def test_waves_take_a_part_of_the_memory() -> None:
    for at_once, in_waves in launch.run(work.memory_of_waves, dp=3):
        assert in_waves < 0.5 * at_once


def test_a_bucket_holds_something() -> None:
    with pytest.raises(ValueError, match="bucket_size is 0; give a number of elements, 1 or more") as error:
        MuonW([nn.Parameter(gaussian(3, 4))], bucket_size=0)
    message(error)


def test_ranks_that_disagree_all_say_so() -> None:
    (said,) = set(launch.run(work.disagree, dp=3))
    assert "rank(s) 1 step with other options, or with gradients for other parameters, than rank 0" in said


def test_replicas_of_ddp_share_newton_schulz_and_end_where_each_ends_alone() -> None:
    """What travels is one update of each matrix, in bf16, from its owner to the two others. Headers come before it."""
    found = launch.run(work.under_ddp, dp=3)
    assert [rank["differ"] for rank in found] == [[]] * 3
    assert sorted(rank["owns"] for rank in found) == [1, 1, 2]
    assert [rank["alone sent"] for rank in found] == [0] * 3
    assert [rank["copies send"] for rank in found] == [0] * 3
    headers = 2 * 4 * 2  # others, elements, bytes
    assert [rank["sent"] for rank in found] == [
        work.STEPS * (headers + 2 * rank["owns"] * 16 * 16 * 2) for rank in found
    ]


def test_replicas_whose_gradients_nobody_has_averaged_say_so_and_stay_as_they_are() -> None:
    ((said, *moved),) = {tuple(found) for found in launch.run(work.on_own_gradients, dp=2)}
    assert said.startswith("replica(s) 1 step with other gradients or options than replica 0; average gradients before")
    assert moved == []


def test_replicas_of_dtensors_are_their_meshs_to_name() -> None:
    (said,) = set(launch.run(work.replicas_on_a_mesh, dp=2))
    assert said.startswith("replicas is given, and there are DTensors, whose mesh says already who holds copies")


@on_meshes
def test_gradients_are_clipped_as_one_process_clips_them(wrap: str, ranks: int) -> None:
    found = launch.run(work.clip, (wrap, 0.5), dp=ranks)
    (norm,) = {rank["norm"] for rank in found}
    for rank in found:
        assert norm == pytest.approx(rank["wanted"], rel=1e-6)
        assert rank["apart"] < 1e-6


def test_a_short_gradient_is_left_as_it_is_and_a_negative_bound_refused() -> None:
    optimizer = MuonW([nn.Parameter(gaussian(3, 4))])
    (p,) = optimizer.param_groups[0]["params"]
    p.grad = gaussian(3, 4, seed=1)
    before = p.grad.clone()
    assert optimizer.clip_grad_norm_(100.0) == pytest.approx(before.norm().item())
    assert torch.equal(p.grad, before)
    with pytest.raises(ValueError, match="max_norm is -1"):
        optimizer.clip_grad_norm_(-1.0)


def test_torch_clips_no_gradients_of_two_meshes() -> None:
    """The contract says so, and points to `MuonW.clip_grad_norm_`: to be told otherwise once torch can."""
    assert "nothing" not in launch.run(work.clip_by_torch, dp=4)


@pytest.mark.parametrize(("ranks", "tp"), [(4, 2), (6, 2), (6, 3)])
def test_parts_that_tp_cuts_unequally_are_trained_as_in_one_process(ranks: int, tp: int) -> None:
    """DTensor's metadata is wrong about them; the boxes are not."""
    assert launch.run(work.uneven_tp, (tp,), dp=ranks) == [[]] * ranks


def test_a_model_is_trained_on_its_own_gradients() -> None:
    alone = launch.run(work.losses, ("plain",))[0]
    for wrap, ranks in (("fsdp", 2), ("tp", 4)):
        for rank in launch.run(work.losses, (wrap,), dp=ranks):
            assert rank == pytest.approx(alone, rel=0.05)
    assert alone[-1] < alone[0] - 0.1


def test_torchs_checkpoint_resumes_on_more_ranks_under_a_falling_learning_rate(tmp_path: Path) -> None:
    launch.run(work.saved_by_torch, (str(tmp_path / "saved"), 2), dp=2)
    assert launch.run(work.resumed_by_torch, (str(tmp_path / "saved"), 2, 5), dp=3) == [[]] * 3


def test_what_one_rank_refuses_stops_all_before_a_weight_moves() -> None:
    first, concerned = launch.run(work.refused_on_one, dp=2)
    assert "rank(s) 1 step with other options" in first[0]
    assert concerned[0].startswith("lr=nan, weight_decay=0.1, momentum=0.95: ")
    assert first[1] == concerned[1] == concerned[0]
    assert first[2] == concerned[2] == "moved: False"


def test_an_infinity_on_one_rank_is_skipped_by_all() -> None:
    for rank in launch.run(work.scaled_infinity, dp=2):
        assert rank == {"moved": [True, False, True], "scale": 4.0}


# ---- A part of a model ------------------------------------------------------------------------------------


@once
def parts() -> list[dict[str, Any]]:
    return launch.run(part_workers.facts, (), dp=2)


def test_a_frozen_layer_costs_no_traffic_and_trains_once_it_is_unfrozen() -> None:
    for rank in parts():
        few, still_few, more, as_many = rank["unfrozen"]["sent"]
        assert 0 < few == still_few < more == as_many
        assert rank["unfrozen"]["moved"] == [False, False, True, True]


@pytest.mark.filterwarnings("ignore")
def test_a_pipelines_stages_do_not_decide_each_for_itself_without_a_word() -> None:
    for rank in parts():
        found = rank["stages"]
        assert "dimension(s) pp" in found["DistributedMuon"]
        refused = {name for name, words in found.items() if words.startswith("refused: ")}
        assert refused == {name for name in found if name.endswith(("max_norm", "skip", "clip", "scaler"))}
        assert all("one pipeline stage alone" in found[name] and "'pp'" in found[name] for name in refused)
        assert "stages=mesh.get_group" in found["MuonW, clip"]
        assert "with_stages" in found["DistributedMuon, skip"]
        assert all("in bf16" in found[name] for name in ("MuonW, scaler", "DistributedMuon, scaler"))
        assert found["unchanged until here"] == "True"
        assert not found["MuonW, step"] + found["MuonW, measure"] + found["DistributedMuon, step"]


def test_parameters_where_their_ranks_cannot_exchange_them_are_refused_at_construction() -> None:
    for rank in parts():
        assert rank["offloaded"].startswith("refused: parameter '0.weight' is on the cpu")
        assert "CPUOffloadPolicy" in rank["offloaded"]


def test_flat_parameters_are_refused_in_both_of_fsdp1s_ways() -> None:
    assert all("(FSDP1)" in words and "fully_shard" in words for rank in parts() for words in rank["FSDP1"])


# ---- Boxes and parcels ------------------------------------------------------------------------------------


def test_strided_shards_are_taken_last() -> None:
    found = boxes((8, 3), (2, 2), (_StridedShard(0, split_factor=2), Shard(0)))
    assert [box[0] for box in found] == [(0, 2), (4, 6), (2, 4), (6, 8)]
    found = boxes((5, 3), (4,), (Shard(0),))
    assert [box[0].size for box in found] == [2, 2, 1, 0]
    assert boxes((5,), (2, 3), (Replicate(), Shard(0))) == boxes((5,), (3,), (Shard(0),)) * 2
    with pytest.raises(ValueError, match="neither a shard nor a replica"):
        boxes((5,), (2,), (Partial(),))


def test_matrices_are_boxes_of_their_parameter() -> None:
    everything = Range(0, 6)
    assert matrices_of("whole", (6, 4)) == [((everything, Range(0, 4)), (6, 4))]
    assert matrices_of("flattened", (6, 2, 3)) == [((everything, Range(0, 2), Range(0, 3)), (6, 6))]
    assert [box[0] for box, _ in matrices_of("stacked", (3, 2, 5))] == [(0, 1), (1, 2), (2, 3)]
    assert [box[1] for box, _ in matrices_of(("columns", 2), (6, 4))] == [(0, 2), (2, 4)]
    fused = matrices_of(("fused", ((4, 2), 1, 1)), (6, 4))
    assert [(box[0], shape) for box, shape in fused] == [
        ((0, 2), (2, 4)), ((2, 4), (2, 4)), ((4, 5), (1, 4)), ((5, 6), (1, 4)),
    ]  # fmt: skip


def test_parcels_of_all_ranks_fit_together() -> None:
    shapes = {"even": (8, 6), "odd": (5, 7), "short": (2, 9)}
    held = [
        ShardedParam(boxes(shape, (2, 2), (Replicate(), Shard(0))), matrices_of("whole", shape))
        for shape in shapes.values()
    ]
    plans = [ExchangePlan(held, 4, rank) for rank in range(4)]
    for sender in range(4):
        for receiver in range(4):
            assert plans[sender].out[receiver] == plans[receiver].coming[sender]
            assert plans[sender].back[receiver] == plans[receiver].returning[sender]
    for rank, plan in enumerate(plans):
        for matrix in plan.mine:
            arrived = [piece for pieces in plan.coming for piece in pieces if piece.matrix == matrix]
            assert sum(volume(piece.box) for piece in arrived) == volume(plan.whole(matrix)[0])  # each box once
        held_here = sum(volume(parameter.boxes[rank]) for parameter in held)
        assert sum(volume(piece.box) for pieces in plan.returning for piece in pieces) == held_here


def test_what_one_rank_holds_whole_it_owns_and_the_rest_is_dealt_out() -> None:
    experts = ShardedParam(boxes((4, 8, 8), (4,), (Shard(0),)), matrices_of("stacked", (4, 8, 8)))
    cut = ShardedParam(boxes((8, 8), (4,), (Shard(0),)), matrices_of("whole", (8, 8)))
    found, loads = owners([experts, cut, cut, cut, cut], 4)
    assert len(set(loads)) == 1
    assert [found[0, number] for number in range(4)] == [0, 1, 2, 3]
    assert sorted(found[index, 0] for index in (1, 2, 3, 4)) == [0, 1, 2, 3]


def test_boxes_overlap_and_lie_within_each_other() -> None:
    one, other = (Range(2, 6), Range(0, 3)), (Range(4, 9), Range(1, 8))
    both = overlap(one, other)
    assert both == ((4, 6), (1, 3))
    assert within(both, one) == (slice(2, 4), slice(1, 3))
    assert extent(both) == (2, 2)
    assert overlap(one, (Range(6, 9), Range(0, 3))) is None


# ---- One device -------------------------------------------------------------------------------------------


def test_on_one_device_it_is_muon_beside_adamw() -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))

    ends = []
    for ours in (True, False):
        net = model()
        if ours:
            optimizers: list[torch.optim.Optimizer] = [MuonW(net, lr=0.02)]
        else:
            hidden, head = net[0], net[2]
            rest = [
                {"params": [head.weight], "weight_decay": 0.1},
                {"params": [hidden.bias, head.bias], "weight_decay": 0.0},
            ]
            optimizers = [
                Muon([hidden.weight], lr=0.02, input_dtype=torch.bfloat16),
                torch.optim.AdamW(rest, lr=0.02),
            ]
        for i in range(3):
            net(gaussian(4, 6, seed=i)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        ends.append([p.detach() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_bad_groups_are_refused_and_leave_no_trace() -> None:
    optimizer = MuonW(nn.Linear(3, 4))
    for group, words in (
        ({"params": [("b", nn.Parameter(torch.zeros(5)))], "algorithm": "muon"}, "1 dimension"),
        ({"params": [("w", nn.Parameter(torch.zeros(5, 5).half()))]}, "holds no momentum"),
        ({"params": [("e", nn.Parameter(torch.zeros(2, 3, 4)))]}, "'stacked' for the experts"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            optimizer.add_param_group(group)
        message(error)
    assert len(optimizer.param_groups) == 2
