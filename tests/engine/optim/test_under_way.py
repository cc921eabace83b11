"""Gradients sent under a backward pass, parameters that arrive under a forward: the same bits, or a refusal."""

from typing import Any

import pytest
import torch
import under_way_workers as work
from helpers_math import message
from once import once
from torch import nn

from distmuon import launch
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.arriving import Arrival
from distmuon.sharding.collectives import PendingWork
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import ParamSpec, plan

on_two_grids = pytest.mark.parametrize(("dp", "tp"), [(3, 1), (2, 2)])
each_variant = pytest.mark.parametrize("variant", work.VARIANTS)


@once
def facts(dp: int, tp: int) -> list[dict[str, Any]]:
    return launch.run(work.under_way_facts, dp=dp, tp=tp)


@once
def reading() -> list[dict[str, Any]]:
    return launch.run(work.reading_facts, dp=3)


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return all(torch.equal(found["values"][name], value) for name, value in expected["values"].items())


@on_two_grids
@each_variant
def test_on_a_late_wire_a_step_ends_to_the_bit_where_one_that_waits_does(dp: int, tp: int, variant: str) -> None:
    for rank in facts(dp, tp):
        found, expected = rank["overlapped"][variant], rank["plain"][variant]
        assert same(found, expected)
        (once_more,) = found["ledger"].keys() - expected["ledger"].keys()
        assert once_more.label == "order of the buckets"
        assert {row: n for row, n in found["ledger"].items() if row is not once_more} == expected["ledger"]


@on_two_grids
@each_variant
def test_gradients_are_sent_under_the_backward_pass_and_parameters_come_after_the_step(
    dp: int, tp: int, variant: str
) -> None:
    for rank in facts(dp, tp):
        plain, overlapped = (rank[how][variant] for how in ("plain", "overlapped"))
        assert plain["sent"] == [0] * work.STEPS
        # `never` and, where it is not used, `sometimes` hold their buckets back to the end of the block
        assert all(0 < sent < overlapped["buckets"] for sent in overlapped["sent"])
        assert plain["arriving"] == 0 < overlapped["arriving"]


@on_two_grids
def test_from_the_second_step_on_every_bucket_sets_out_before_the_first_layer_is_through(dp: int, tp: int) -> None:
    for rank in facts(dp, tp):
        first, *others = rank["first layer"]
        assert all(sent >= all_of_them - 2 for sent, all_of_them in others), (first, others)


@on_two_grids
def test_the_backends_own_reduce_scatter_may_be_late_too(dp: int, tp: int) -> None:
    for rank in facts(dp, tp):
        late, plain = rank["native"]
        assert same(late, plain)


CHANGED = "was changed after it had been sent under the backward pass; clip with max_norm"


@on_two_grids
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("again", "gets a gradient after those of its bucket were sent; put only the last backward pass"),
        ("nested", "of this step have been sent already; overlap_backward() is for its last backward pass alone"),
        ("clipped_by_torch", CHANGED),
        ("unscaled", CHANGED),
        ("dropped_by_the_model", CHANGED),
        ("clipped_before", "of this step are clipped already; call step() or zero_grad() next"),
        ("dropped_inside", "are being sent; leave the block of overlap_backward() before zero_grad()"),
        ("added_on_one_rank", CHANGED),
    ],
)
def test_what_comes_too_late_is_refused_on_all_ranks_and_changes_nothing(
    dp: int, tp: int, fault: str, words: str
) -> None:
    for rank in facts(dp, tp):
        told, fine = rank["refusals"][fault]
        assert words in told
        assert fine


@on_two_grids
def test_one_rank_that_overlaps_alone_is_named(dp: int, tp: int) -> None:
    for rank in facts(dp, tp):
        assert "'overlap_backward' is True on rank" in rank["one rank"]


@on_two_grids
def test_a_pass_that_was_dropped_or_failed_leaves_nothing(dp: int, tp: int) -> None:
    for rank in facts(dp, tp):
        assert rank["dropped"] == {"after": True, "failed": True}


@on_two_grids
def test_a_grad_scaler_may_leave_its_scale_to_the_step(dp: int, tp: int) -> None:
    assert all(rank["scaled"] for rank in facts(dp, tp))


@on_two_grids
def test_a_bucket_that_is_sent_before_it_is_complete_is_found(dp: int, tp: int) -> None:
    assert all("gets a gradient after those of its bucket were sent" in rank["early"] for rank in facts(dp, tp))


@pytest.mark.parametrize("how", work.READS)
def test_whoever_reads_a_parameter_gets_it_when_it_is_there(how: str) -> None:
    assert [rank["read"][how] for rank in reading()] == [(True, True, True)] * 3


@pytest.mark.parametrize("what", work.ASKS)
def test_what_needs_no_values_waits_for_none(what: str) -> None:
    assert [rank["asked"][what] for rank in reading()] == [(True, True)] * 3


def test_a_wire_that_is_late_would_show_who_does_not_wait() -> None:
    assert [rank["torn"] for rank in reading()].count(True) == 2  # the owner has it


def test_after_the_wait_all_are_ordinary_parameters() -> None:
    for rank in reading():
        assert rank["left"] == []
        assert rank["state"]


def test_a_compiled_forward_pass_is_told_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(2, 2)
    bucket = plan([ParamSpec("weight", (2, 2), "float32")], 1).buckets[0]
    arrival = Arrival(bucket, PendingWork(), [layer.weight])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match=r"call the optimizer's wait_for_parameters\(\) before it") as error:
        layer(torch.ones(2))
    message(error)
    monkeypatch.undo()
    arrival.wait()
    assert type(layer.weight) is nn.Parameter
    assert layer(torch.ones(2)).shape == (2,)


def test_alone_there_is_nothing_to_wait_for() -> None:
    layer = nn.Linear(2, 2)
    optimizer: ShardedOptimizer = Zero1AdamW(list(layer.named_parameters()), Grid.alone(), overlap_forward=True)
    with optimizer.overlap_backward():
        layer(torch.ones(2)).sum().backward()
    before = layer.weight.detach().clone()
    optimizer.step()
    assert type(layer.weight) is nn.Parameter
    assert not torch.equal(layer.weight, before)
