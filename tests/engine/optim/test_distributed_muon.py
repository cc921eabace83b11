"""Distributed Muon, and ZeRO-1 beside it, on real grids (see sharded_checks.py) and on a grid of one rank."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optimizer_cases as cases
import pytest
import torch
from checks import on_every_rank
from helpers_math import message
from optimizer_cases import ADAMW, SMALL, Case
from sharded_checks import MIXED, same
from torch import Tensor, nn

from distmuon import launch
from distmuon.models.networks import MLP
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.param_groups import split_parameters
from distmuon.sharding.collectives import Group
from distmuon.sharding.gradients import NonFiniteGradient
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.verify.counter import CollectiveCounter

test_on_2_x_2 = on_every_rank("sharded_checks", dp=2, tp=2)
test_on_3_x_1 = on_every_rank("sharded_checks", dp=3)


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("global buffer size", replace(SMALL, bucket_size=1)),
        ("set of parameters", replace(SMALL, weights=SMALL.weights[:-1])),
        ("set of parameters", MIXED),
        ("division into groups", replace(SMALL, groups=(ADAMW, ADAMW, ADAMW))),
    ],
)
def test_the_state_of_another_map_is_refused_and_changes_nothing(what: str, other: Case) -> None:
    _, saver = cases.build(other, Grid.alone())
    parameters, optimizer = cases.build(SMALL, Grid.alone())
    cases.go_on(SMALL, Grid.alone(), parameters, optimizer, range(1))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=f"belongs elsewhere, it has another {what};") as error:
        optimizer.load_state_dict(saver.state_dict())
    message(error)
    assert same(before, optimizer.state_dict())


# ---- On a grid of one rank --------------------------------------------------------------------------------


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(cases.synthetic("matrix", shape or (4, 3), torch.float32))


def test_a_grid_of_one_needs_no_collective_and_no_process_group() -> None:
    grid = Grid.alone()
    with CollectiveCounter() as counter:
        outcome = cases.train_sharded(replace(SMALL, max_norm=1e6), grid)
    assert grid.ledger == counter.ledger == Ledger()
    assert not list(grid.ledger)
    assert not torch.distributed.is_initialized()
    (expected,) = launch.run(cases.train_alone, (SMALL, 1, 1))
    assert same(outcome.values, expected.values)


def test_a_later_optimizer_takes_the_parameters_and_the_earlier_one_says_so() -> None:
    parameter = matrix()
    first = DistributedMuon([("hidden", parameter)], Grid.alone())
    parameter.square().sum().backward()
    gradient = parameter.grad
    second = DistributedMuon([parameter], Grid.alone())
    before = parameter.detach().clone()
    assert gradient is not None
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, 2 * before)  # which backward left before
    with pytest.raises(RuntimeError, match="'hidden' belongs to an optimizer that was made later") as error:
        first.step()
    message(error)
    assert torch.equal(parameter, before)
    parameter.square().sum().backward()
    assert torch.equal(gradient, 2 * before)  # nothing reaches the first any more
    second.step()
    assert not torch.equal(parameter, before)


def test_a_refused_optimizer_claims_nothing() -> None:
    parameter = matrix()
    with pytest.raises(ValueError, match="strategy"):
        DistributedMuon([parameter], Grid.alone(), strategy="gossip")
    with pytest.raises(ValueError, match="1 dimension"):
        DistributedMuon([parameter, matrix(3)], Grid.alone())
    DistributedMuon([parameter], Grid.alone())


def build(params: Any, **options: Any) -> Callable[[], DistributedMuon]:
    return lambda: DistributedMuon(params, Grid.alone(), **options)


def named(name: str, tensor: Tensor) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point() or tensor.is_complex()))]


@pytest.mark.parametrize(
    ("kind", "words", "attempt"),
    [
        (ValueError, "strategy is 'gossip'; choose one of .*gather_all", build([matrix()], strategy="gossip")),
        (ValueError, "on_nonfinite is 'shrug'; choose one of raise, skip", build([matrix()], on_nonfinite="shrug")),
        (TypeError, "'every' .*; DistributedMuon has lr", build([matrix()], strategy_options={"every": 5})),
        (ValueError, "bucket_size is 0", build([matrix()], bucket_size=0)),
        (TypeError, "gather_dtype is 'bf16'.*torch.bfloat16", build([matrix()], gather_dtype="bf16")),
        (ValueError, "AdamW refuses its group: .*1.5",
         build([{"params": [matrix()], "algorithm": "adamw", "betas": (0.9, 1.5)}])),
        (ValueError, "'b' is given twice .*'a'", lambda: build([("a", p := matrix()), ("b", p)])()),
        (ValueError, "'b' is given twice .*'a'",
         lambda: build([{"params": [("a", p := matrix())]}, {"params": [("b", p)], "algorithm": "adamw"}])()),
        (ValueError, "two parameters are named 'a'", build([("a", matrix()), ("a", matrix())])),
        (ValueError, "publish is 'weights'; choose one of parameters, updates", build([matrix()], publish="weights")),
        (ValueError, "needs Muon's matrices in buckets of their own",
         lambda: cases.build(SMALL, Grid.alone(), bucket_size=10_000, publish="updates")),
        (ValueError, "needs parameters that are their own masters",
         lambda: cases.build(SMALL.of_dtype(torch.bfloat16), Grid.alone(), publish="updates", strategy="owner")),
        (ValueError, "'flat' has 1 dimension.*AdamW", build(named("flat", torch.ones(3)))),
        (ValueError, "'unreal' has dtype 'complex64'",
         build([{"params": named("unreal", 1j * torch.ones(3)), "algorithm": "adamw"}])),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_what_cannot_work_is_refused_in_one_sentence(
    kind: type[Exception], words: str, attempt: Callable[[], Any]
) -> None:
    with pytest.raises(kind, match=words) as error:
        attempt()
    message(error)


def test_an_embedding_in_a_muon_group_is_warned_about_by_name() -> None:
    with pytest.warns(UserWarning, match=r"'model.embedding.weight' looks like an embedding"):
        DistributedMuon([("model.embedding.weight", matrix())], Grid.alone())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DistributedMuon([{"params": [("model.embedding.weight", matrix())], "algorithm": "adamw"}], Grid.alone())


def test_a_refusal_names_every_bad_parameter_up_to_five() -> None:
    parameters = {f"w{i}": matrix() for i in range(8)}
    optimizer = DistributedMuon(list(parameters.items()), Grid.alone())
    for name in ("w1", "w3"):
        parameters[name].grad = torch.full((4, 3), torch.nan)
    with pytest.raises(NonFiniteGradient, match="gradient of w1, w3 is not finite") as error:
        optimizer.step()
    message(error)
    for p in parameters.values():
        p.grad = torch.full((4, 3), torch.inf)
    with pytest.raises(NonFiniteGradient, match="gradient of w0, w1, w2, w3, w4 and 3 more is not finite"):
        optimizer.step()


def test_a_parameter_that_has_lost_its_mark_is_refused_under_tensor_parallelism() -> None:
    grid = replace(Grid.alone(), tp=Group("tp", 2))
    model = MLP((4, 8, 6, 3), grid.tp)
    DistributedMuon(split_parameters(model), grid)
    with pytest.raises(ValueError, match=r"'layers\.0\.weight' does not say how it is cut over TP.*mark"):
        DistributedMuon(split_parameters(copy.deepcopy(model)), grid)
