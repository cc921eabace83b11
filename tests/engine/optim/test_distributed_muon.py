"""Distributed Muon on real worlds: equal to one process to the bit, on every grid, through every kind of bad day."""

import copy
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optimizer_cases as cases
import optimizer_workers as work
import pytest
import torch
from helpers_math import distance, message
from once import once
from optimizer_cases import ABSENT_ROWS, ADAMW, MATRICES, RAGGED, SMALL, TINY, Case, Outcome
from optimizer_workers import BAD_NUMBERS, same
from torch import Tensor, nn

from distmuon import launch
from distmuon.models.networks import MLP
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.options import MOMENTA, SCALES
from distmuon.optim.param_groups import split_parameters
from distmuon.sharding.collectives import Group
from distmuon.sharding.gradients import NonFiniteGradient
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.verify.counter import CollectiveCounter

on_every_grid = pytest.mark.parametrize(("dp", "tp"), [(4, 1), (2, 2), (1, 4), (3, 1)])
MIXED = SMALL.of_dtype(torch.bfloat16, torch.float32)
FLOAT64 = SMALL.of_dtype(torch.float64)
CASES = {"ragged": RAGGED, "small": SMALL, "bf16 and fp32": MIXED, "float64": FLOAT64, "one element": TINY}
CASES["matrices"] = MATRICES


@once
def facts(dp: int, tp: int) -> list[dict[str, Any]]:
    """Return what each rank of one world has found out; the world runs once, when the first test asks."""
    return launch.run(work.muon_facts, dp=dp, tp=tp)


@once
def one_process(case_name: str, dp: int, tp: int) -> Outcome:
    case = CASES.get(case_name) or {"absent": ABSENT_ROWS, "clipped": replace(FLOAT64, max_norm=1.5)}[case_name]
    (outcome,) = launch.run(cases.train_alone, (case, dp, tp))  # here, with one thread as every rank has
    return outcome


def outcomes(dp: int, tp: int, name: str) -> list[Outcome]:
    return [found["outcomes"][name] for found in facts(dp, tp)]


def different(case: Case, dp: int, tp: int, name: str, expected: dict[str, Tensor]) -> list[tuple[int, str]]:
    """Return (rank, parameter) wherever a rank's slice is not, to the bit, that of the expected whole parameter."""
    return [
        (rank, w.name)
        for rank, outcome in enumerate(outcomes(dp, tp, name))
        for w in case.weights
        if not torch.equal(outcome.values[w.name], cases.cut(expected[w.name], w.dim, tp, rank % tp))
    ]


def furthest(dp: int, tp: int, name: str, expected: dict[str, Tensor]) -> float:
    """Return the largest relative difference of any parameter on any rank."""
    return max(
        distance(outcome.values[w.name], cases.cut(expected[w.name], w.dim, tp, rank % tp))
        for rank, outcome in enumerate(outcomes(dp, tp, name))
        for w in SMALL.weights
    )


# ---- Equal to one process ---------------------------------------------------------------------------------


@on_every_grid
@pytest.mark.parametrize("name", CASES)
def test_every_rank_ends_to_the_bit_where_one_process_does(dp: int, tp: int, name: str) -> None:
    expected = one_process(name, dp, tp).values
    assert different(CASES[name], dp, tp, name, expected) == []
    start = {w.name: cases.whole_start(w, tp) for w in CASES[name].weights}
    assert not any(torch.equal(expected[key], start[key]) for key in start)  # everything has moved


@on_every_grid
@pytest.mark.parametrize("strategy", ["gather_cut", "owner"])
def test_every_strategy_ends_there_too(dp: int, tp: int, strategy: str) -> None:
    for name, case in (CASES | {"absent": ABSENT_ROWS}).items():
        assert different(case, dp, tp, f"{strategy} {name}", one_process(name, dp, tp).values) == [], name


@on_every_grid
def test_a_long_shard_taken_in_waves_ends_there_too(dp: int, tp: int) -> None:
    expected = one_process("ragged", dp, tp).values
    assert different(RAGGED, dp, tp, "gather_cut ragged, one bucket", expected) == []


@on_every_grid
def test_publishing_updates_instead_of_parameters_changes_no_bit(dp: int, tp: int) -> None:
    for name, case in {"small": SMALL, "float64": FLOAT64, "absent": ABSENT_ROWS}.items():
        assert different(case, dp, tp, f"updates {name}", one_process(name, dp, tp).values) == [], name
    in_waves, expected = "updates in waves of matrices", one_process("matrices", dp, tp).values
    assert different(MATRICES, dp, tp, in_waves, expected) == []


@pytest.mark.parametrize(
    ("dtype", "options", "says"),
    [
        (torch.float32, {"publish": "weights"}, "publish is 'weights'; choose one of parameters, updates."),
        (torch.float32, {"publish": "updates"}, "needs Muon's matrices in buckets of their own"),
        (torch.bfloat16, {"publish": "updates", "strategy": "owner"}, "needs parameters that are their own masters"),
    ],
)
def test_updates_are_published_only_where_every_rank_can_take_them(
    dtype: torch.dtype, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        cases.build(SMALL.of_dtype(dtype), Grid.alone(), bucket_size=10_000, **options)


@on_every_grid
def test_blockwise_is_muon_on_all_that_tp_does_not_cut_and_on_nothing_else(dp: int, tp: int) -> None:
    found = different(SMALL, dp, tp, "blockwise small", one_process("small", dp, tp).values)
    cut = {w.name for w in SMALL.weights if w.dim is not None and len(w.shape) == 2}
    assert {name for _, name in found} == (cut if tp > 1 else set())


@on_every_grid
def test_parameters_without_a_gradient_rest_and_one_rank_without_counts_as_zero(dp: int, tp: int) -> None:
    expected = one_process("absent", dp, tp).values
    assert different(ABSENT_ROWS, dp, tp, "absent", expected) == []
    (never,) = (w for w in ABSENT_ROWS.weights if w.name == "other rows")
    assert torch.equal(expected[never.name], cases.whole_start(never, tp))  # not even decay


@on_every_grid
def test_where_nobody_has_a_gradient_no_state_is_made(dp: int, tp: int) -> None:
    found = [rank["without gradient"] for rank in facts(dp, tp)]
    assert all(rank["moved"] == ["rows"] for rank in found)
    assert any(rank["momentum"] for rank in found)
    assert all(rank["momentum"] in ([], ["rows"]) for rank in found)
    assert all(rank["adamw"] == 0 for rank in found)


@on_every_grid
def test_the_bucket_size_changes_no_bit(dp: int, tp: int) -> None:
    expected = one_process("small", dp, tp).values
    for size in (1, 30, 10_000):
        assert different(SMALL, dp, tp, f"buckets of {size}", expected) == []
        assert different(SMALL, dp, tp, f"owner, buckets of {size}", expected) == []


@on_every_grid
def test_batching_equal_shapes_changes_no_more_than_rounding(dp: int, tp: int) -> None:
    assert furthest(dp, tp, "batched", one_process("float64", dp, tp).values) < 1e-12


@on_every_grid
def test_poison_in_the_padding_and_in_what_is_gathered_for_nobody_reaches_nothing(dp: int, tp: int) -> None:
    for name, case in (("small", SMALL), ("bf16 and fp32", MIXED)):
        assert different(case, dp, tp, f"poisoned {name}", one_process(name, dp, tp).values) == []
    norms = [outcome.norms for outcome in outcomes(dp, tp, "poisoned small")]
    assert norms == [outcome.norms for outcome in outcomes(dp, tp, "small")]
    assert all(math.isfinite(norm) for norm in norms[0])


@on_every_grid
def test_these_cases_hold_what_is_hard(dp: int, tp: int) -> None:
    found = facts(dp, tp)[0]["map"]
    assert found["buffers"] == 2
    assert found["buckets"] >= 4
    assert (found["padding"] > 0) == (dp > 1)
    assert (found["straddling"] >= 3) == (dp > 1)
    owned = [rank["pieces of one element"] for rank in facts(dp, tp)]
    assert owned == [1] * tp + [0] * (dp - 1) * tp  # more ranks than elements: the others own nothing


@on_every_grid
def test_accumulated_micro_batches_equal_one_big_batch(dp: int, tp: int) -> None:
    expected, start = work.one_batch(), work.regression_start()
    for rank in facts(dp, tp):
        for name, value in rank["micro-batches"].items():
            assert distance(value, expected[name]) < 1e-12
            assert distance(value, start[name]) > 1e-3


# ---- The global norm --------------------------------------------------------------------------------------


@on_every_grid
def test_clipping_equals_torchs_on_the_whole_gradients(dp: int, tp: int) -> None:
    expected = one_process("clipped", dp, tp)
    assert all(norm > 1.5 for norm in expected.norms)
    assert different(SMALL, dp, tp, "not clipped", one_process("float64", dp, tp).values) == []
    assert furthest(dp, tp, "clipped", expected.values) < 1e-12
    for name, tolerance in (("clipped", 1e-14), ("clipped fp32", 1e-6)):
        for outcome in outcomes(dp, tp, name):
            assert outcome.norms == pytest.approx(expected.norms, rel=tolerance)
            assert outcome.norms == outcomes(dp, tp, name)[0].norms  # to the bit: all ranks clip alike


@on_every_grid
def test_clipping_moves_adamw_and_muon_alike(dp: int, tp: int) -> None:
    clipped, free = one_process("clipped", dp, tp).values, one_process("float64", dp, tp).values
    for name in ("table", "bias", "rows"):  # clipping that forgot an algorithm would leave its parameters here
        assert distance(clipped[name], free[name]) > 1e-6


# ---- NaN and infinity -------------------------------------------------------------------------------------


@on_every_grid
@pytest.mark.parametrize(("how", "name"), [(how, name) for how, name, _ in BAD_NUMBERS])
def test_one_bad_number_on_one_rank_stops_the_step_on_all(dp: int, tp: int, how: str, name: str) -> None:
    for rank in facts(dp, tp):
        found, clean = rank["not finite"][how, name], rank["clean"]
        assert found["untouched"]  # parameters, momentum, AdamW's state and step counts
        assert found["skipped"] == int(how == "skip")
        assert (found["error"] is not None) == (how == "raise")
        if how == "raise":
            assert found["error"].startswith(f"the gradient of {name} is not finite, or its square is not;")
        assert same(found["after"], clean["after"])  # as if the bad step had never been


# ---- Saving and loading -----------------------------------------------------------------------------------


@on_every_grid
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64", "owner"])
def test_a_saved_run_goes_on_to_the_bit(dp: int, tp: int, dtype: str) -> None:
    assert all(rank["resumed"][dtype] for rank in facts(dp, tp))


@on_every_grid
def test_one_rank_can_save_alone(dp: int, tp: int) -> None:
    found = [rank["saving alone"] for rank in facts(dp, tp)]
    assert [saved["collectives"] for saved in found] == [0] * len(found)
    assert found[-1]["state"]["state"] or dp > 1  # only an owner has momentum
    assert found[-1]["state"]["place"]["rank"] == (dp - 1, tp - 1)


@on_every_grid
def test_the_state_of_another_rank_is_refused(dp: int, tp: int) -> None:
    refusal = facts(dp, tp)[0]["foreign rank"]
    other = (0, 1) if tp > 1 else (1, 0)
    assert refusal.startswith(f"this state belongs elsewhere, it has another rank: {other} instead of (0, 0); load it")


def test_the_state_of_another_grid_is_refused() -> None:
    state = facts(2, 2)[3]["saving alone"]["state"]
    _, optimizer = cases.build(SMALL, Grid.alone())
    with pytest.raises(ValueError, match=r"another grid: \(2, 2\) instead of \(1, 1\); load it") as error:
        optimizer.load_state_dict(state)
    message(error)


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
    work.go_on(SMALL, Grid.alone(), parameters, optimizer, range(1))
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


@pytest.mark.parametrize("kind", MOMENTA)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("coefficients", ["muon", "polar_express", (3.0, -3.2, 1.2)])
def test_every_option_means_what_it_means_on_one_device(
    kind: str, nesterov: bool, scale: str, coefficients: Any
) -> None:
    options = dict(momentum_kind=kind, nesterov=nesterov, scale=scale, ns_coefficients=coefficients)
    case = replace(SMALL, groups=({"algorithm": "muon"} | options, *SMALL.groups[1:]))
    (expected,) = launch.run(cases.train_alone, (case, 1, 1))
    assert same(cases.train_sharded(case, Grid.alone()).values, expected.values)


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


def test_groups_without_names_may_be_several_and_are_named_by_their_place() -> None:
    groups = [{"params": [matrix(), matrix()]}, {"params": matrix(3), "algorithm": "adamw"}]
    optimizer = DistributedMuon(groups, Grid.alone())
    assert optimizer.buffers.names == ["group0.0", "group0.1", "group1.0"]


def build(params: Any, **options: Any) -> Callable[[], DistributedMuon]:
    return lambda: DistributedMuon(params, Grid.alone(), **options)


def named(name: str, tensor: Tensor) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point() or tensor.is_complex()))]


@pytest.mark.parametrize(
    ("kind", "words", "attempt"),
    [
        (ValueError, "strategy is 'gossip'; choose one of .*gather_all", build([matrix()], strategy="gossip")),
        (ValueError, "algorithm is 'sgd'; choose one of muon",
         build([{"params": [matrix()], "algorithm": "sgd"}])),
        (ValueError, "on_nonfinite is 'shrug'; choose one of raise, skip", build([matrix()], on_nonfinite="shrug")),
        (TypeError, "learning_rate.*DistributedMuon has .*lr", build([{"params": [matrix()], "learning_rate": 1.0}])),
        (TypeError, "'every' .*; DistributedMuon has lr", build([matrix()], strategy_options={"every": 5})),
        (ValueError, "scale is 'big'", build([matrix()], scale="big")),
        (ValueError, "momentum_kind is 'mean'", build([{"params": [matrix()], "momentum_kind": "mean"}])),
        (ValueError, "lr=-1", build([matrix()], lr=-1)),
        (ValueError, "coefficients are 'gold'", build([matrix()], ns_coefficients="gold")),
        (ValueError, "bucket_size=0", build([matrix()], bucket_size=0)),
        (TypeError, "gather_dtype is 'bf16'.*torch.bfloat16", build([matrix()], gather_dtype="bf16")),
        (TypeError, "compute_dtype is torch.int32.*'auto'", build([matrix()], compute_dtype=torch.int32)),
        (ValueError, "AdamW refuses its group: .*1.5",
         build([{"params": [matrix()], "algorithm": "adamw", "betas": (0.9, 1.5)}])),
        (ValueError, "'b' is given twice .*'a'", lambda: build([("a", p := matrix()), ("b", p)])()),
        (ValueError, "'b' is given twice .*'a'",
         lambda: build([{"params": [("a", p := matrix())]}, {"params": [("b", p)], "algorithm": "adamw"}])()),
        (ValueError, "two parameters are named 'a'", build([("a", matrix()), ("a", matrix())])),
        (ValueError, "'flat' has 1 dimension.*AdamW", build(named("flat", torch.ones(3)))),
        (ValueError, "'cube' of shape .3, 2, 2.*AdamW", build(named("cube", torch.ones(3, 2, 2)))),
        (ValueError, "'hollow' is empty.*AdamW", build(named("hollow", torch.ones(0, 3)))),
        (ValueError, "'whole' has dtype torch.int64", build(named("whole", torch.ones(3, 3, dtype=torch.int64)))),
        (ValueError, "'unreal' has dtype torch.complex64", build(named("unreal", 1j * torch.ones(3, 3)))),
        (ValueError, "'holes' is sparse", build(named("holes", torch.eye(3).to_sparse()))),
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
