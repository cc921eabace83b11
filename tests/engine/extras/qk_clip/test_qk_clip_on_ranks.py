"""QK-Clip on many ranks: one maximum for all of them, and to the bit the weights of one process."""

from __future__ import annotations

from typing import Any

import clip_workers as work
import pytest
import torch
from once import once

from distmuon import launch
from distmuon.sharding.grid import Grid

MESHES = ("fsdp", "columns", "hybrid", "tp")


@once
def facts() -> list[dict[str, Any]]:
    return launch.run(work.facts, dp=2, tp=2)


@once
def alone(case: str) -> dict[str, Any]:
    dtype = "bfloat16" if "bfloat16" in case else "gather_all"
    return work.on_grid(Grid.alone(), dtype)


# ---- DistributedMuon --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", work.CASES)
def test_every_strategy_and_schedule_ends_to_the_bit_where_one_process_does(case: str) -> None:
    expected = alone(case)
    assert all(summary["clipped heads"] >= 2 for _, _, summary in expected["said"])
    for rank in facts():
        found = rank[case]
        differ = [n for n, w in expected["whole"].items() if not torch.equal(w, found["whole"][n])]
        assert differ == []
        for (largest, gammas, summary), (theirs, their_gammas, theirs_in_short) in zip(
            found["said"], expected["said"], strict=True
        ):
            assert summary == theirs_in_short
            for name in largest:
                assert torch.equal(largest[name], theirs[name])
                assert torch.equal(gammas[name], their_gammas[name])


def test_scaling_is_no_strangers_write_and_a_skipped_step_scales_nothing() -> None:
    assert alone("gather_all")["skipped"] == 1
    for found in (rank[case] for rank in facts() for case in work.CASES):
        assert (found["touched"], found["skipped"]) == ([False] * work.STEPS, 1)
        assert found["calls"] == work.STEPS + 1  # one collective more in each, the skipped one too


def test_ranks_that_differ_all_say_so_and_none_hangs() -> None:
    (said,) = {tuple(sorted(rank["complaints"].items())) for rank in facts()}
    found = dict(said)
    assert "threshold=3.0" in found["made with another threshold"]
    assert "'block' is 2 heads on rank 1, and 4 heads on rank 0" in found["made with other heads"]
    assert "12 rows, which are no 5 heads" in found["made with wrong heads"]
    assert "set threshold and alpha alike" in found["threshold changed"]
    assert found["a NaN"].startswith("NonFiniteLogits: the logits of 'block', head ")
    assert found["afterwards"] == "{'largest logit': 0.0, 'clipped heads': 0.0}"


# ---- Meshes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", MESHES)
def test_on_a_mesh_the_same_logits_give_the_same_bits_wherever_shards_cut(wrap: str) -> None:
    for rank in facts():
        assert (rank[wrap]["differ"], rank[wrap]["gammas"], rank[wrap]["calls"]) == ([], [], 1)
        assert min(rank[wrap]["clipped"].values()) >= 1
    assert any(rank["fsdp"]["empty"] for rank in facts())


@pytest.mark.parametrize("wrap", ["fsdp", "tp"])
def test_on_a_mesh_the_forward_pass_records_the_largest_of_all_ranks(wrap: str) -> None:
    for rank in facts():
        for name, values in rank["forward alone"].items():
            assert torch.allclose(rank[f"forward {wrap}"][name], values, rtol=1e-5)


def test_an_infinity_on_one_rank_skips_the_clip_on_all() -> None:
    for rank in facts():
        assert rank["infinity"] == [(True, 0), (False, 1), (True, 1)]


def test_replicas_under_a_plain_optimizer_must_say_whose_batches_count() -> None:
    (said,) = {rank["replicas"]["said"] for rank in facts()}
    assert "plain tensors on one of 4 ranks" in said
    (largest,) = {tuple(one) for rank in facts() for one in rank["replicas"]["largest"]}
    batches = [work.queries_and_keys("even", 0, batch, 4, 4, 3) for batch in range(4)]
    each = torch.stack([(q @ k.mT).amax((0, 2, 3)) for q, k in batches])
    assert largest == pytest.approx((each.amax(0).double() / 3**0.5).tolist(), rel=1e-12)
