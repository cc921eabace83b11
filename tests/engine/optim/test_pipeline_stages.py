"""Pipeline stages with an optimizer each clip by one norm, skip together and refuse together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import stage_workers as work
import torch
from once import once

from distmuon import launch
from distmuon.sharding.grid import Grid


@pytest.mark.parametrize(("kind", "by", "tp"), [("muon", "max_norm", 2), ("muon", "call", 1), ("adamw", "max_norm", 1)])
def test_two_stages_clip_as_the_whole_model_does(kind: str, by: str, tp: int) -> None:
    whole = launch.run(work.alone, (kind, by))[0]
    assert min(whole["norms"]) > 1.0  # something is clipped
    seen: set[int] = set()
    ranks = launch.run(work.clipped, (kind, tp, by), dp=4 // tp, tp=tp)
    for rank in ranks:
        assert rank["norms"] == ranks[0]["norms"]  # to the bit, or replicas would drift
        assert rank["norms"] == pytest.approx(whole["norms"], rel=1e-12)
        for number, p in rank["parameters"].items():
            torch.testing.assert_close(p, whole["parameters"][number], rtol=1e-5, atol=1e-6)
            seen.add(number)
        assert rank["sent"] > 0
    assert seen == set(whole["parameters"])


def test_stages_of_fsdp2_clip_by_one_norm_too() -> None:
    norms = set()
    for rank in launch.run(work.muonw_clipped, dp=4):
        norms.add(rank["norm"])
        for number, clipped in rank["gradients"].items():
            raw = work.gradient(clipped, number, 0)
            torch.testing.assert_close(clipped, raw / (rank["norm"] + 1e-6))
    (norm,) = norms
    numbers = range(4 * work.LAYERS)
    shapes = [p.shape for stage in (0, 1) for p in work.layers(stage).parameters()]
    squares = sum(
        float(work.gradient(torch.empty(shape), number, 0).double().square().sum())
        for number, shape in zip(numbers, shapes, strict=True)
    )
    assert norm == pytest.approx(math.sqrt(squares))


HEARD = {  # what stage 0 alone has -> what its ranks hear, and those of stage 1
    "not finite": ("NonFiniteGradient: the gradient of 0.weight", "NonFiniteGradient: a gradient of another pipeline"),
    "skipped": ("", ""),
    "another norm": ("RankMismatchError: the stages", "RankMismatchError: the stages"),
    "steps": ("RankMismatchError: the stages", "RankMismatchError: the stages"),
    "one rank's rate": ("RankMismatchError: the options", "RankMismatchError: the stages"),
    "a replica": ("RankMismatchError: the values of '0.weight'", "RankMismatchError: the stages"),
    "refused": ("ValueError: lr=0.1", "RankMismatchError: the stages"),
}


@once
def heard() -> list[dict[str, Any]]:
    return launch.run(work.stage_facts, ([*HEARD],), dp=4)


@pytest.mark.parametrize("what", HEARD)
def test_what_one_stage_cannot_do_all_leave_undone(what: str) -> None:
    for rank in (found[what] for found in heard()):
        assert rank["said"].startswith(HEARD[what][rank["stage"]]), rank
        assert bool(rank["said"]) == (what != "skipped")
        assert not rank["moved"]
        assert rank["skipped"] == (what == "skipped")


def test_a_scaler_is_refused_where_stages_are_known_too() -> None:
    grid: Any = Grid.alone()
    grid.refuse_scaler()
    grid.stages.size = 2
    with pytest.raises(ValueError, match=r"a GradScaler would see one pipeline stage alone.*in bf16"):
        grid.refuse_scaler()
    grid.refuse_one_stage("clip_grad_norm_")
