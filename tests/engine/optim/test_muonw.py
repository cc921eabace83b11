"""MuonW: on every mesh to the bit what one process does, in two collectives; and what it cannot take, it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import muonw_workers as work
import pytest
import torch
from helpers_math import gaussian, message
from once import once
from torch import nn
from torch.distributed.tensor import Shard

from distmuon import MuonW, launch
from distmuon.optim.exchange_plan import ShardedParam, owners
from distmuon.optim.muon import Muon
from distmuon.sharding.boxes import boxes, matrices_of
from distmuon.sharding.layout import Range

MESHES = {"fsdp": 3, "columns": 2, "hybrid": 4, "tp": 6, "experts": 4, "replicas": 3}  # -> how many ranks
on_meshes = pytest.mark.parametrize("wrap", MESHES)


@once
def mesh(wrap: str) -> list[dict[str, Any]]:
    return launch.run(work.mesh_facts, (wrap,), dp=MESHES[wrap])


@once
def facts() -> list[dict[str, Any]]:
    return launch.run(work.rank_facts, dp=3)


# ---- On meshes --------------------------------------------------------------------------------------------


@on_meshes
def test_every_rank_ends_to_the_bit_where_one_process_does(wrap: str) -> None:
    for rank in mesh(wrap):
        assert rank["ends"]["differ"] == []
        assert rank["ends"]["rows"] == {"experts": True, "kernel": True, "fused": True}  # what NorMuon keeps


def test_so_it_does_in_float64_and_in_bfloat16_it_ends_nearby() -> None:
    """torch rounds a + alpha b in bfloat16 once in a vector and twice in what is left over, so place tells."""
    for rank in mesh("tp"):
        assert rank["float64"] == rank["bfloat16"] == []


@on_meshes
def test_a_step_makes_two_collectives_and_one_for_normuon(wrap: str) -> None:
    for rank in mesh(wrap):
        assert rank["ends"]["calls"] == [3] * work.STEPS
        assert rank["ends"]["told"] == 3 * work.STEPS


@on_meshes
def test_a_step_waits_for_the_device_once_however_many_ranks_there_are(wrap: str) -> None:
    for rank in mesh(wrap):
        assert rank["waits"] == ["clip_grad_norm_", "_refuse_different"]


@on_meshes
def test_every_matrix_has_one_owner(wrap: str) -> None:
    found = [matrix for rank in mesh(wrap) for matrix in rank["ends"]["mine"]]
    assert sorted(found) == sorted(mesh(wrap)[0]["ends"]["all"])


@on_meshes
def test_matrices_that_are_taken_in_waves_end_where_all_at_once_do(wrap: str) -> None:
    for rank in mesh(wrap):
        found = rank["waves"]
        assert found["differ"] == []
        assert 2 < found["waves"] == (found["calls"] - 1) / 2
        assert found["early"]  # one that does not wait is found


def test_waves_take_a_part_of_the_memory() -> None:
    for rank in facts():
        at_once, in_waves = rank["memory of waves"]
        assert in_waves < 0.5 * at_once


def test_a_bucket_holds_something() -> None:
    with pytest.raises(ValueError, match="bucket_size is 0; give a number of elements, 1 or more") as error:
        MuonW([nn.Parameter(gaussian(3, 4))], bucket_size=0)
    message(error)


def test_ranks_that_disagree_all_say_so() -> None:
    (said,) = {rank["disagree"] for rank in facts()}
    assert "rank(s) 1 step with other options, or with gradients for other parameters, than rank 0" in said


def test_replicas_of_ddp_share_newton_schulz_and_end_where_each_ends_alone() -> None:
    """What travels is one update of each matrix, in bf16, from its owner to the two others. Headers come before it."""
    found = [rank["under DDP"] for rank in facts()]
    assert [rank["differ"] for rank in found] == [[]] * 3
    assert sorted(rank["owns"] for rank in found) == [1, 1, 2]
    assert [rank["alone sent"] for rank in found] == [0] * 3
    assert [rank["copies send"] for rank in found] == [0] * 3
    headers = 2 * 4 * 2  # others, elements, bytes
    assert [rank["sent"] for rank in found] == [
        work.STEPS * (headers + 2 * rank["owns"] * 16 * 16 * 2) for rank in found
    ]


def test_replicas_whose_gradients_nobody_has_averaged_say_so_and_stay_as_they_are() -> None:
    ((said, *moved),) = {tuple(rank["own gradients"]) for rank in facts()}
    assert said.startswith(
        "replica(s) 1, 2 step with other gradients or options than replica 0; average gradients before"
    )
    assert moved == []


def test_replicas_of_dtensors_are_their_meshs_to_name() -> None:
    (said,) = {rank["replicas on a mesh"] for rank in facts()}
    assert said.startswith("replicas is given, and there are DTensors, whose mesh says already who holds copies")


@on_meshes
def test_gradients_are_clipped_as_one_process_clips_them(wrap: str) -> None:
    found = [rank["clipped"] for rank in mesh(wrap)]
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


def test_parts_that_tp_cuts_unequally_are_trained_as_in_one_process() -> None:
    """DTensor's metadata is wrong about them; the boxes are not."""
    assert [rank["uneven"] for rank in mesh("tp")] == [[]] * MESHES["tp"]


def test_torchs_checkpoint_resumes_on_more_ranks_under_a_falling_learning_rate(tmp_path: Path) -> None:
    launch.run(work.saved_by_torch, (str(tmp_path / "saved"), 2), dp=2)
    assert launch.run(work.resumed_by_torch, (str(tmp_path / "saved"), 2, 5), dp=3) == [[]] * 3


def test_what_one_rank_refuses_stops_all_before_a_weight_moves() -> None:
    first, concerned, _ = (rank["refused on one"] for rank in facts())
    assert "rank(s) 1 step with other options" in first[0]
    assert concerned[0].startswith("lr=nan, weight_decay=0.1, momentum=0.95: ")
    assert first[1] == concerned[1] == concerned[0]
    assert first[2] == concerned[2] == "moved: False"


def test_an_infinity_on_one_rank_is_skipped_by_all() -> None:
    for rank in facts():
        assert rank["infinity"] == {"moved": [True, False, True], "scale": 4.0}


# ---- A part of a model ------------------------------------------------------------------------------------


def test_a_frozen_layer_costs_no_traffic_and_trains_once_it_is_unfrozen() -> None:
    for rank in facts():
        few, still_few, more, as_many = rank["parts"]["unfrozen"]["sent"]
        assert 0 < few == still_few < more == as_many
        assert rank["parts"]["unfrozen"]["moved"] == [False, False, True, True]


@pytest.mark.filterwarnings("ignore")
def test_a_pipelines_stages_do_not_decide_each_for_itself_without_a_word() -> None:
    for rank in facts():
        found = rank["parts"]["stages"]
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
    for rank in facts():
        said = rank["parts"]["offloaded"]
        assert said.startswith("refused: parameter '0.weight' is on the cpu")
        assert "CPUOffloadPolicy" in said


def test_flat_parameters_are_refused_in_both_of_fsdp1s_ways() -> None:
    assert all("(FSDP1)" in words and "fully_shard" in words for rank in facts() for words in rank["parts"]["FSDP1"])


# ---- Boxes and parcels ------------------------------------------------------------------------------------


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


def test_what_one_rank_holds_whole_it_owns_and_the_rest_is_dealt_out() -> None:
    experts = ShardedParam(boxes((4, 8, 8), (4,), (Shard(0),)), matrices_of("stacked", (4, 8, 8)))
    cut = ShardedParam(boxes((8, 8), (4,), (Shard(0),)), matrices_of("whole", (8, 8)))
    found, loads = owners([experts, cut, cut, cut, cut], 4)
    assert len(set(loads)) == 1
    assert [found[0, number] for number in range(4)] == [0, 1, 2, 3]
    assert sorted(found[index, 0] for index in (1, 2, 3, 4)) == [0, 1, 2, 3]


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
