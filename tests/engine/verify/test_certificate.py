"""The equivalence certificate holds on every grid, and fails as soon as one thing differs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import certificate_workers as workers
import pytest
import torch

from distmuon import launch
from distmuon.models.digits import digits
from distmuon.sharding.grid import Grid
from distmuon.verify import certificate
from distmuon.verify.certificate import CONTROL_FACTOR, FLOAT64_BOUND, Certificate, Evidence
from distmuon.verify.training import Run, initial_parameters

CPU = torch.device("cpu")
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
every_grid = pytest.mark.parametrize(("dp", "tp"), workers.GRIDS)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def references_once() -> Iterator[None]:
    """Make each single-process run once: it is the same for all grids."""

    def remembering(train: Callable[..., Run]) -> Callable[..., Run]:
        runs: dict[Any, Run] = {}

        def once(recipe: Any, *rest: Any) -> Run:
            if recipe not in runs:
                runs[recipe] = train(recipe, *rest)
            return runs[recipe]

        return once

    with pytest.MonkeyPatch.context() as patch:
        for name in ("train_alone", "train_control"):
            patch.setattr(certificate, name, remembering(getattr(certificate, name)))
        yield


# ---- It holds ---------------------------------------------------------------------------------------------


@every_grid
@pytest.mark.parametrize("name", workers.RECIPES)
def test_the_sharded_run_is_the_single_process_run(dp: int, tp: int, name: str) -> None:
    recipe, evidence = workers.RECIPES[name], workers.witnesses(dp, tp)[0].evidence[name]
    judged = certificate.judge(recipe, evidence, dp, CPU)
    assert judged.verdicts == {"exact": True, "float64": True, "replicas": True, recipe.dtype: True}, judged
    assert 0 < judged.control_relative_difference < 0.5  # a control that moves the result further would excuse anything
    close = {"float32": 1e-5, "bfloat16": 0.02}[recipe.dtype]
    assert evidence.run.losses[0] == pytest.approx(judged.reference.losses[0], rel=close)
    assert evidence.run.losses[-1] < evidence.run.losses[0]


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
        assert judged.relative_difference == judged.float64_relative_difference == 0


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
    found = launch.run(workers.bear_witness, (others, False), dp=2)[0].evidence
    twice, hair = (certificate.judge(recipe, found[name], 2, CPU) for name in others)
    assert twice.verdicts == {"exact": False, "float64": False, "float32": False, "replicas": True}
    assert not hair.verdicts["float64"]
    assert hair.float64_relative_difference == pytest.approx(1e-8, rel=0.1)
    assert hair.verdicts["float32"]  # rounding alone moves the result further: this certificate is the coarse one


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
        ({"relative_difference": 1.01 * CONTROL_FACTOR * 1e-3}, {"float32"}),
        ({"relative_difference": float("nan")}, {"float32"}),
        ({"control_relative_difference": float("nan")}, {"float32"}),
    ],
)
def test_every_verdict_stands_on_its_own_bound(changes: dict[str, Any], fails: set[str]) -> None:
    good = Certificate("float32", True, FLOAT64_BOUND, CONTROL_FACTOR * 1e-3, 1e-3, True, Run([], {}, 0.0))
    assert {name for name, passed in replace(good, **changes).verdicts.items() if not passed} == fails


def test_a_run_in_float64_has_no_coarser_certificate() -> None:
    recipe = replace(workers.RECIPES["muon float32"], dtype="float64")
    given = workers.witnesses(1, 1)[0].evidence["muon float32"]
    evidence = Evidence(replace(given.run, parameters=given.float64), given.exact, given.float64, True)
    judged = certificate.judge(recipe, evidence, 1, CPU)
    assert judged.verdicts.keys() == {"exact", "float64", "replicas"}
    assert not judged.exact  # its gradients were float32


def test_difference_is_relative_to_the_movement_over_all_parameters() -> None:
    start = {"a": torch.zeros(2), "b": torch.ones(3)}
    reference = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([1.0, 5.0, 1.0])}  # moved by 5
    found = {"a": reference["a"] + 1e-3, "b": reference["b"]}
    assert certificate.difference(found, reference, start) == pytest.approx(1e-3 * 2**0.5 / 5, rel=1e-3)


def test_made_up_gradients_differ_by_rank_and_step_and_accept_any_seed() -> None:
    recipe = replace(workers.TINY["tiny bfloat16"], seed=2**63 - 1)
    first = certificate.made_up_gradients(recipe, 0, 0)
    again, other_rank, other_step = (
        certificate.made_up_gradients(recipe, *place) for place in ((0, 0), (0, 1), (1, 0))
    )
    assert certificate.identical(first, again)
    assert not any(torch.equal(first[name], other[name]) for other in (other_rank, other_step) for name in first)
    assert {gradient.dtype for gradient in first.values()} == {torch.bfloat16}
    assert first.keys() == initial_parameters(recipe).keys()
