"""The equivalence certificate holds on every grid, and fails as soon as one thing differs."""

import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import certificate_workers as workers
import pytest
import torch
from torch import nn

from distmuon import launch
from distmuon.models.recipe import Recipe
from distmuon.sharding.grid import Grid
from distmuon.verify import certificate
from distmuon.verify.bounds import CONTROL_FACTOR, FEW_STEPS, FLOAT64_BOUND, POWERLESS, Drift
from distmuon.verify.certificate import Certificate, Evidence
from distmuon.verify.problem import Run
from distmuon.verify.training import initial_parameters

CPU = torch.device("cpu")
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def references_once() -> Iterator[None]:
    """Make each single-process run once: it is the same for all grids."""

    with pytest.MonkeyPatch.context() as patch:
        for name in ("train_alone", "train_control"):
            patch.setattr(certificate, name, functools.cache(getattr(certificate, name)))
        yield


def judge(recipe: Recipe, evidence: Evidence, tp: int = 1) -> Certificate:
    return certificate.judge(workers.problem_alone(recipe, tp), evidence, CPU)


# ---- It holds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "tp", "name"), workers.on_grids(workers.RECIPES))
def test_the_sharded_run_is_the_single_process_run(dp: int, tp: int, name: str) -> None:
    recipe, evidence = workers.RECIPES[name], workers.witnesses(dp, tp)[0].evidence[name]
    judged = judge(recipe, evidence)
    drift = judged.drifts[recipe.dtype]
    rows = {"float32"} if name == "adamw float32" else {"unrounded", recipe.dtype}
    assert judged.drifts.keys() == rows
    has_power = rows if CONTROL_FACTOR * drift.control < POWERLESS else {"unrounded"}
    passed = {row for row, verdict in judged.verdicts.items() if verdict}
    assert passed == {"exact", "float64", "replicas"} | has_power, judged
    assert judged.passed
    for each in judged.drifts.values():
        assert each.difference < CONTROL_FACTOR / 2 * each.control  # as chapter 6 says: half of what is allowed
    finest = next(iter(judged.drifts.values()))
    assert 0 < finest.control < 1e-5  # the row that rounds nothing has power, and much
    close = {"float32": 1e-5, "bfloat16": 0.02}[recipe.dtype]
    assert evidence.run.losses[0] == pytest.approx(judged.reference.losses[0], rel=close)
    assert evidence.run.losses[-1] < evidence.run.losses[0]


@pytest.mark.parametrize(
    ("dp", "tp", "name"),
    [*workers.on_grids(workers.TINY | workers.BEYOND), (*workers.LARGE_GRID, "tiny float32")],
)
def test_every_strategy_is_the_same_optimizer(dp: int, tp: int, name: str) -> None:
    recipe, evidence = workers.EVERY[name], workers.witnesses(dp, tp)[0].evidence[name]
    judged = judge(recipe, evidence)
    assert (judged.exact, judged.replicas_agree) == (True, True)
    assert judged.float64_relative_difference <= FLOAT64_BOUND
    assert judged.drifts["unrounded"].passed


@pytest.mark.parametrize(("dp", "tp", "name"), workers.on_grids(workers.OTHERS))
def test_other_optimizers_are_what_they_are_and_not_muon(dp: int, tp: int, name: str) -> None:
    recipe, evidence = workers.OTHERS[name], workers.witnesses(dp, tp)[0].evidence[name]
    judged = judge(recipe, evidence, tp)
    assert (judged.exact, judged.replicas_agree) == (True, True)
    assert judged.float64_relative_difference <= FLOAT64_BOUND
    assert judged.drifts["unrounded"].passed
    if tp == 1 or name == "periodic every step":
        assert judged.from_muon is None
        assert all(verdict for row, verdict in judged.verdicts.items() if row != recipe.dtype)  # there luck decides
        owner = workers.problem_alone(replace(recipe, strategy="owner"), tp)
        assert certificate.identical(certificate.exact_alone(owner, CPU, dp), evidence.exact.parameters)
    else:
        assert judged.from_muon is not None
        assert judged.from_muon > 1e-2
        assert judged.verdicts["muon"] is False
        assert not judged.passed


def test_nothing_differs_where_nothing_is_sharded() -> None:
    """On 1 x 1 the sharded code does the reference's arithmetic in the reference's order."""
    for name, recipe in workers.RECIPES.items():
        judged = judge(recipe, workers.witnesses(1, 1)[0].evidence[name])
        assert judged.float64_relative_difference == 0
        assert {drift.difference for drift in judged.drifts.values()} == {0}


def test_the_control_is_the_same_training_with_other_sums() -> None:
    problem = workers.problem_alone(replace(workers.TINY["tiny float32"], dtype="float64"))
    alone, control = (train(problem, CPU) for train in (certificate.train_alone, certificate.train_control))
    assert 0 < certificate.difference(control.parameters, alone.parameters, problem.start) < FLOAT64_BOUND
    assert control.losses == pytest.approx(alone.losses, rel=1e-12)


def test_where_a_model_enlarges_rounding_float64_is_held_beside_a_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this one did, by a bound that is below what rounding does; a wrong rate of 1e-8 fails, see below."""
    monkeypatch.setattr(certificate, "FLOAT64_BOUND", 1e-18)
    judged = judge(workers.RECIPES["muon float32"], workers.witnesses(2, 2)[0].evidence["muon float32"])
    assert judged.verdicts["float64"]
    assert 1e-18 < judged.float64_relative_difference <= judged.float64_bound < 1e-12
    assert re.search(r"^  float64 .*, 4 x control +pass$", "\n".join(judged.lines()), re.MULTILINE)


# ---- And it can fail --------------------------------------------------------------------------------------


@every_dtype
def test_one_element_off_by_one_ulp_is_not_exact(dtype: str) -> None:
    recipe, evidence = workers.RECIPES[f"muon {dtype}"], workers.witnesses(2, 2)[0].evidence[f"muon {dtype}"]
    exact = evidence.exact.parameters
    for name, whole in exact.items():
        off = whole.clone().flatten()
        off[-1] = torch.nextafter(off[-1], torch.full_like(off[-1], torch.inf))
        spoiled = replace(evidence, exact=evidence.exact._replace(parameters=exact | {name: off.view_as(whole)}))
        assert judge(recipe, evidence).verdicts["exact"]
        assert not judge(recipe, spoiled).verdicts["exact"], name


def test_another_learning_rate_fails_the_certificates_that_can_see_it() -> None:
    recipe = workers.TINY["tiny float32"]
    others = {"twice": replace(recipe, lr=2 * recipe.lr), "a hair more": replace(recipe, lr=recipe.lr * (1 + 1e-8))}
    found = launch.run(workers.run_cases, (others, False), dp=2)[0].evidence
    twice, hair = (judge(recipe, found[name]) for name in others)
    fails = dict.fromkeys(("exact", "float64", "unrounded", "float32"), False)
    assert twice.verdicts == fails | {"replicas": True}
    assert not hair.verdicts["float64"]
    assert hair.float64_relative_difference == pytest.approx(1e-8, rel=0.1)
    assert hair.verdicts["unrounded"]  # rounding alone moves these results further
    assert hair.verdicts["float32"]


def test_a_replica_that_is_off_by_one_ulp_is_noticed() -> None:
    assert launch.run(workers.compare_replicas, (None,), dp=2, tp=1)[0]
    assert not launch.run(workers.compare_replicas, (1,), dp=2, tp=1)[0]


@pytest.mark.parametrize(
    ("changes", "fails"),
    [
        ({}, set()),
        ({"exact": False}, {"exact"}),
        ({"replicas_agree": False}, {"replicas"}),
        ({"float64_relative_difference": 1.01 * FLOAT64_BOUND}, {"float64"}),
        ({"float64_relative_difference": float("nan")}, {"float64"}),
        (
            {"drifts": {"unrounded": Drift(1.01 * CONTROL_FACTOR * 1e-6, 1e-6), "float32": Drift(0.0, 1.0)}},
            {"unrounded"},
        ),
    ],
)
def test_every_verdict_stands_on_its_own_bound(changes: dict[str, Any], fails: set[str]) -> None:
    drifts = {"unrounded": Drift(CONTROL_FACTOR * 1e-6, 1e-6), "float32": Drift(CONTROL_FACTOR * 1e-3, 1e-3)}
    judged = replace(Certificate(True, FLOAT64_BOUND, drifts, True, Run([], {}, 0.0)), **changes)
    assert {name for name, passed in judged.verdicts.items() if passed is False} == fails
    assert judged.passed == (not fails)


@pytest.mark.parametrize(
    ("difference", "control", "passed"),
    [
        (CONTROL_FACTOR * 1e-3, 1e-3, True),
        (1.01 * CONTROL_FACTOR * 1e-3, 1e-3, False),
        (1.0, POWERLESS / CONTROL_FACTOR, None),
        (float("nan"), 1e-3, False),
        (0.0, float("nan"), False),
        (float("inf"), float("inf"), False),
    ],
)
def test_a_row_whose_bound_is_too_wide_neither_passes_nor_fails(
    difference: float, control: float, passed: bool | None
) -> None:
    assert Drift(difference, control).passed is passed


def test_the_unrounded_problem_is_float32_throughout_and_nothing_where_nothing_is_rounded() -> None:
    for dtype in ("float32", "bfloat16"):
        unrounded = workers.problem_alone(Recipe(dtype=dtype, lr=0.03, steps=FEW_STEPS + 1)).unrounded
        assert (unrounded.dtype, unrounded.wire, unrounded.steps) == (torch.float32, torch.float32, FEW_STEPS)
        assert unrounded.unrounded is unrounded
        _, _, optimizer = unrounded.on_grid(Grid.alone())
        assert optimizer.strategy.context.gather_dtype == optimizer.param_groups[0]["compute_dtype"] == torch.float32
        muon = certificate.Reference(unrounded, CPU).optimizers[0].param_groups[0]
        assert muon["input_dtype"] == muon["compute_dtype"] == torch.float32
    assert workers.problem_alone(Recipe(dtype="bfloat16", optimizer="adamw")).unrounded.dtype == torch.float32
    for recipe in (Recipe(dtype="float64"), Recipe(optimizer="adamw")):
        nothing = workers.problem_alone(recipe)
        assert nothing.unrounded is nothing


def test_the_exact_run_adds_in_rank_order_whatever_the_backend() -> None:
    problem, given = workers.problem_alone(workers.TINY["tiny float32"]), Grid.alone()
    native = replace(given, dp=replace(given.dp, native_reduce_scatter=True))

    def make_optimizer(model: nn.Module, grid: Grid) -> Any:
        assert not grid.dp.native_reduce_scatter
        return problem.make_optimizer(model, grid)

    found = certificate.exact_on_grid(replace(problem, make_optimizer=make_optimizer), native)
    assert certificate.identical(found.parameters, certificate.exact_alone(problem, CPU, 1))


def test_a_run_in_float64_has_no_coarser_certificate() -> None:
    recipe = replace(workers.RECIPES["muon float32"], dtype="float64")
    given = workers.witnesses(1, 1)[0].evidence["muon float32"]
    evidence = Evidence(replace(given.run, parameters=given.float64), given.exact, given.float64, None, True)
    judged = judge(recipe, evidence)
    assert judged.verdicts.keys() == {"exact", "float64", "replicas"}
    assert not judged.exact  # its gradients were float32


def test_difference_is_relative_to_the_movement_over_all_parameters() -> None:
    start = {"a": torch.zeros(2), "b": torch.ones(3)}
    reference = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([1.0, 5.0, 1.0])}  # moved by 5
    found = {"a": reference["a"] + 1e-3, "b": reference["b"]}
    assert certificate.difference(found, reference, start) == pytest.approx(1e-3 * 2**0.5 / 5, rel=1e-3)


def test_made_up_gradients_differ_by_rank_step_and_micro_batch_and_accept_any_seed() -> None:
    recipe = replace(workers.TINY["tiny bfloat16"], seed=2**63 - 1)
    problem = workers.problem_alone(recipe)
    first = certificate.synthetic_gradients(problem, 0, 0)
    again, *others = (certificate.synthetic_gradients(problem, *at) for at in ((0, 0), (0, 1), (1, 0), (0, 0, 1)))
    assert certificate.identical(first, again)
    assert not any(torch.equal(first[name], other[name]) for other in others for name in first)
    assert {gradient.dtype for gradient in first.values()} == {torch.bfloat16}
    assert first.keys() == initial_parameters(recipe).keys()
