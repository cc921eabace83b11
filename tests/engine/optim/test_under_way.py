"""Gradients sent under a backward pass, parameters that arrive under a forward: the same bits, or a refusal."""

import gc
import weakref

import pytest
import torch
from checks import on_every_rank
from helpers_math import message
from torch import nn

from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.arriving import Arrival
from distmuon.sharding.collectives import PendingWork
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import ParamSpec, plan

test_on_ranks = on_every_rank("under_way_checks", dp=2, tp=2)


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


def test_who_drops_a_model_before_it_has_arrived_keeps_nothing_of_it() -> None:
    layer = nn.Linear(2, 2)
    bucket = plan([ParamSpec("weight", (2, 2), "float32")], 1).buckets[0]
    Arrival(bucket, PendingWork(), [layer.weight])
    weight = weakref.ref(layer.weight)
    del layer
    gc.collect()
    assert weight() is None


def test_alone_there_is_nothing_to_wait_for() -> None:
    layer = nn.Linear(2, 2)
    optimizer: ShardedOptimizer = Zero1AdamW(list(layer.named_parameters()), Grid.alone(), overlap_forward=True)
    with optimizer.overlap_backward():
        layer(torch.ones(2)).sum().backward()
    before = layer.weight.detach().clone()
    optimizer.step()
    assert type(layer.weight) is nn.Parameter
    assert not torch.equal(layer.weight, before)
