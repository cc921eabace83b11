"""The equivalence certificate holds on every grid, and fails as soon as one thing differs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import certificate_workers as workers
import pytest
import torch

from distmuon import launch
from distmuon.models.digits import digits
from distmuon.models.recipe import CONTROL_FACTOR, FEW_STEPS, FLOAT64_BOUND, POWERLESS, Recipe
from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from distmuon.sharding.tensor_parallel import tp_split_dim
from distmuon.verify import certificate
from distmuon.verify.certificate import Certificate, Evidence
from distmuon.verify.drift import Drift
from distmuon.verify.training import Run, build, initial_parameters, network

CPU = torch.device("cpu")
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def references_once() -> Iterator[None]:
    """Make each single-process run once: it is the same for all grids."""

    def remembering(train: Callable[..., Run]) -> Callable[..., Run]:
        runs: dict[Any, Run] = {}

        def once(recipe: Any, device: Any, data: Any, tp: int = 1) -> Run:
            if (recipe, tp) not in runs:
                runs[recipe, tp] = train(recipe, device, data, tp)
            return runs[recipe, tp]

        return once

    with pytest.MonkeyPatch.context() as patch:
        for name in ("train_alone", "train_control"):
            patch.setattr(certificate, name, remembering(getattr(certificate, name)))
        yield


# ---- It holds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "tp", "name"), workers.on_grids(workers.RECIPES))
def test_the_sharded_run_is_the_single_process_run(dp: int, tp: int, name: str) -> None:
    recipe, evidence = workers.RECIPES[name], workers.witnesses(dp, tp)[0].evidence[name]
    judged = certificate.judge(recipe, evidence, dp, CPU)
    drift = judged.drifts[recipe.dtype]
    rows = {"float32"} if name == "adamw float32" else {"unrounded", recipe.dtype}
    assert judged.drifts.keys() == rows
    has_power = rows if CONTROL_FACTOR * drift.control < POWERLESS else {"unrounded"}
    passed = {row for row, verdict in judged.verdicts.items() if verdict}
    assert passed == {"exact", "float64", "replicas"} | has_power, judged
    assert judged.passed
    assert drift.difference <= CONTROL_FACTOR * drift.control
    finest = next(iter(judged.drifts.values()))
    assert 0 < finest.control < 1e-5  # the row that rounds nothing has power, and much
    close = {"float32": 1e-5, "bfloat16": 0.02}[recipe.dtype]
    assert evidence.run.losses[0] == pytest.approx(judged.reference.losses[0], rel=close)
    assert evidence.run.losses[-1] < evidence.run.losses[0]


@pytest.mark.parametrize(("dp", "tp", "name"), workers.on_grids(workers.TINY | workers.BEYOND))
def test_every_strategy_is_the_same_optimizer(dp: int, tp: int, name: str) -> None:
    recipe, evidence = workers.EVERY[name], workers.witnesses(dp, tp)[0].evidence[name]
    judged = certificate.judge(recipe, evidence, dp, CPU)
    assert (judged.exact, judged.replicas_agree) == (True, True)
    assert judged.float64_relative_difference <= FLOAT64_BOUND
    assert judged.drifts["unrounded"].passed


@pytest.mark.parametrize(("dp", "tp", "name"), workers.on_grids(workers.OTHERS))
def test_other_optimizers_are_what_they_are_and_not_muon(dp: int, tp: int, name: str) -> None:
    recipe, evidence = workers.OTHERS[name], workers.witnesses(dp, tp)[0].evidence[name]
    judged = certificate.judge(recipe, evidence, dp, CPU, tp)
    assert (judged.exact, judged.replicas_agree) == (True, True)
    assert judged.float64_relative_difference <= FLOAT64_BOUND
    assert judged.drifts["unrounded"].passed
    if tp == 1 or name == "periodic every step":
        assert judged.from_muon is None
        assert all(verdict for row, verdict in judged.verdicts.items() if row != recipe.dtype)  # there luck decides
        assert certificate.identical(
            certificate.exact_alone(replace(recipe, strategy="owner"), dp, CPU, tp), evidence.exact
        )
    else:
        assert judged.from_muon is not None
        assert judged.from_muon > 1e-2
        assert judged.verdicts["muon"] is False
        assert not judged.passed


def test_what_rounds_nothing_stays_beside_its_control_whatever_the_seed() -> None:
    """With ReLU one seed in about thirty did not: a unit was on for one digit, here, and off there."""
    dp, tp = 2, 2
    recipe, seeds = Recipe(steps=FEW_STEPS).shared_by(dp).unrounded, range(16)
    for seed, found in zip(seeds, launch.run(workers.train_seeds, (recipe, seeds), dp=dp, tp=tp)[0], strict=True):
        seeded = replace(recipe, seed=seed)
        drift = certificate.References.make(seeded, dp, CPU, full=False, tp=tp).drift(seeded, found)
        assert drift.passed, (seed, drift)
        assert drift.control < 1e-5, (seed, drift)


@pytest.mark.parametrize(("dp", "tp"), workers.LARGE_GRIDS)
@every_dtype
def test_thirty_two_ranks_give_the_single_process_result(dp: int, tp: int, dtype: str) -> None:
    evidence = workers.witnesses(dp, tp)[0].evidence[f"tiny {dtype}"]
    judged = certificate.judge(workers.TINY[f"tiny {dtype}"], evidence, dp, CPU)
    assert (judged.exact, judged.replicas_agree) == (True, True)
    assert judged.float64_relative_difference <= FLOAT64_BOUND


def test_nothing_differs_where_nothing_is_sharded() -> None:
    """On 1 x 1 the sharded code does the reference's arithmetic in the reference's order."""
    for name, recipe in workers.RECIPES.items():
        judged = certificate.judge(recipe, workers.witnesses(1, 1)[0].evidence[name], 1, CPU)
        assert judged.float64_relative_difference == 0
        assert {drift.difference for drift in judged.drifts.values()} == {0}


def test_the_control_is_the_same_training_with_other_sums() -> None:
    recipe = replace(workers.TINY["tiny float32"], dtype="float64")
    data, _ = digits(Grid.alone(), recipe.seed)
    alone, control = (train(recipe, CPU, data) for train in (certificate.train_alone, certificate.train_control))
    assert 0 < certificate.difference(control.parameters, alone.parameters, initial_parameters(recipe)) < FLOAT64_BOUND
    assert control.losses == pytest.approx(alone.losses, rel=1e-12)


# ---- And it can fail --------------------------------------------------------------------------------------


@every_dtype
def test_one_element_off_by_one_ulp_is_not_exact(dtype: str) -> None:
    recipe, evidence = workers.RECIPES[f"muon {dtype}"], workers.witnesses(2, 2)[0].evidence[f"muon {dtype}"]
    for name, whole in evidence.exact.items():
        off = whole.clone().flatten()
        off[-1] = torch.nextafter(off[-1], torch.full_like(off[-1], torch.inf))
        spoiled = replace(evidence, exact=evidence.exact | {name: off.view_as(whole)})
        assert certificate.judge(recipe, evidence, 2, CPU).verdicts["exact"]
        assert not certificate.judge(recipe, spoiled, 2, CPU).verdicts["exact"], name


def test_another_learning_rate_fails_the_certificates_that_can_see_it() -> None:
    recipe = workers.RECIPES["muon float32"]
    others = {"twice": replace(recipe, lr=2 * recipe.lr), "a hair more": replace(recipe, lr=recipe.lr * (1 + 1e-8))}
    found = launch.run(workers.run_cases, (others, False), dp=2)[0].evidence
    twice, hair = (certificate.judge(recipe, found[name], 2, CPU) for name in others)
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
        (0.0, POWERLESS / CONTROL_FACTOR, None),
        (1.0, POWERLESS / CONTROL_FACTOR, None),
        (float("nan"), 1e-3, False),
        (0.0, float("nan"), False),
        (float("nan"), 1.0, False),
        (float("inf"), float("inf"), False),
    ],
)
def test_a_row_whose_bound_is_too_wide_neither_passes_nor_fails(
    difference: float, control: float, passed: bool | None
) -> None:
    assert Drift(difference, control).passed is passed


def test_the_unrounded_recipe_is_float32_throughout_and_nothing_where_nothing_is_rounded() -> None:
    for dtype in ("float32", "bfloat16"):
        recipe = Recipe(dtype=dtype, lr=0.03, steps=FEW_STEPS + 1)
        assert recipe.unrounded == Recipe(dtype="float32", lr=0.03, steps=FEW_STEPS, wire="float32")
        assert recipe.unrounded.gather_dtype == recipe.unrounded.compute_dtype == torch.float32
        assert recipe.unrounded.unrounded == recipe.unrounded
    assert Recipe(dtype="bfloat16", optimizer="adamw").unrounded.dtype == "float32"
    for nothing in (Recipe(dtype="float64"), Recipe(optimizer="adamw")):
        assert nothing.unrounded is nothing


def test_the_exact_run_adds_in_rank_order_whatever_the_backend() -> None:
    recipe, given = workers.TINY["tiny float32"], Grid.alone()
    native = replace(given, dp=replace(given.dp, native_reduce_scatter=True))

    def make(recipe: Recipe, grid: Grid, **options: Any) -> Any:
        assert not grid.dp.native_reduce_scatter
        return build(recipe, grid, **options)

    found = certificate.exact_on_grid(recipe, native, make)
    assert certificate.identical(found, certificate.exact_alone(recipe, 1, CPU))


def test_a_made_up_backward_pass_brings_the_gradients_to_the_bit_cut_over_tp() -> None:
    recipe = workers.TINY["tiny bfloat16"]
    tp = Group("tp", 2, 1)
    model = network(recipe, tp)
    gradients = certificate.synthetic_gradients(recipe, 0, 0)
    certificate.backward(model, gradients, tp)
    for name, parameter in model.named_parameters():
        dim = tp_split_dim(parameter)
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradients[name] if dim is None else gradients[name].chunk(2, dim)[1])


def test_a_run_in_float64_has_no_coarser_certificate() -> None:
    recipe = replace(workers.RECIPES["muon float32"], dtype="float64")
    given = workers.witnesses(1, 1)[0].evidence["muon float32"]
    evidence = Evidence(replace(given.run, parameters=given.float64), given.exact, given.float64, None, True)
    judged = certificate.judge(recipe, evidence, 1, CPU)
    assert judged.verdicts.keys() == {"exact", "float64", "replicas"}
    assert not judged.exact  # its gradients were float32


def test_difference_is_relative_to_the_movement_over_all_parameters() -> None:
    start = {"a": torch.zeros(2), "b": torch.ones(3)}
    reference = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([1.0, 5.0, 1.0])}  # moved by 5
    found = {"a": reference["a"] + 1e-3, "b": reference["b"]}
    assert certificate.difference(found, reference, start) == pytest.approx(1e-3 * 2**0.5 / 5, rel=1e-3)


def test_made_up_gradients_differ_by_rank_step_and_micro_batch_and_accept_any_seed() -> None:
    recipe = replace(workers.TINY["tiny bfloat16"], seed=2**63 - 1)
    first = certificate.synthetic_gradients(recipe, 0, 0)
    again, *others = (certificate.synthetic_gradients(recipe, *at) for at in ((0, 0), (0, 1), (1, 0), (0, 0, 1)))
    assert certificate.identical(first, again)
    assert not any(torch.equal(first[name], other[name]) for other in others for name in first)
    assert {gradient.dtype for gradient in first.values()} == {torch.bfloat16}
    assert first.keys() == initial_parameters(recipe).keys()
