"""The museum: the healthy code passes every check, and each broken variant fails exactly those that are named here."""

import re

import pytest
import stored_pages
import torch

from distmuon import launch
from distmuon.sharding.grid import Grid
from distmuon.verify.certificate import difference, identical
from muonbook.ch11 import experiments as workers
from muonbook.ch11.museum import EXHIBITS, broken

pytestmark = pytest.mark.usefixtures("one_thread")

RESULTS = [f"{scenario}: result" for scenario in workers.SCENARIOS]  # bitwise equal to single-device Muon
BYTES = [f"{scenario}: bytes" for scenario in workers.SCENARIOS]  # counted == predicted, on every rank
RAISES = [f"{scenario}: raises" for scenario in workers.SCENARIOS]

CAUGHT_BY: dict[str | None, list[str]] = {
    None: [],
    "stale group parameters": ["two groups: result"],
    "1-D view": RAISES,
    "missing padding": RAISES,
    "wrong tp dim": RESULTS,
    "block-wise Newton–Schulz": RESULTS + BYTES,
    "owned piece only": RESULTS + BYTES,
    "empty shard": [],  # every rank owns a piece in these scenarios; see the test of a lonely rank
    "gradient, not momentum": RESULTS,
    "no Newton–Schulz": RESULTS,
    "cast before normalizing": ["large gradients: result"],
    "once per micro-batch": ["two micro-batches: result", "two micro-batches: bytes"],
}


HOW = {"ours": "nowhere in public", "run": "run)", "reported": "reported", "read": "read"}  # the first that "Seen" has


@pytest.fixture(scope="module")
def visits():
    """Every exhibit in every scenario, on one 2 x 2 grid: one dict per rank."""
    return launch.run(workers.tour, ([None, *EXHIBITS],), dp=workers.DP, tp=workers.TP)[0]


def failed_checks(visits, name: str | None) -> set[str]:
    failed = set()
    for label, scenario in workers.SCENARIOS.items():
        reference = workers.alone(scenario)
        for found in visits:
            seen = found[name, label]
            if seen.error:
                failed.add(f"{label}: raises")
                continue
            if not identical(seen.parameters, reference):
                failed.add(f"{label}: result")
            if seen.bytes:
                failed.add(f"{label}: bytes")
    return failed


@pytest.mark.parametrize("name", [None, *EXHIBITS], ids=lambda name: name or "the healthy code")
def test_exactly_the_named_checks_catch_it(visits, name: str | None) -> None:
    assert failed_checks(visits, name) == set(CAUGHT_BY[name])
    assert name is None or EXHIBITS[name].__doc__


def moved(visits, name: str, label: str) -> dict[str, float]:
    return workers.moved(visits[0][name, label].parameters, workers.SCENARIOS[label])


def test_with_stale_parameters_the_first_group_stands_still_and_the_second_moves_twice(visits) -> None:
    parameters = visits[0]["stale group parameters", "two groups"].parameters
    start = workers.initial()
    assert all(torch.equal(parameters[key], start[key]) for key in ("columns", "rows"))
    far = moved(visits, "stale group parameters", "two groups")
    assert far["whole"] == pytest.approx(10, rel=0.02)  # once more, with the first group's tenfold learning rate


def test_the_two_variants_that_raise_say_the_same_on_every_rank(visits) -> None:
    said = {"1-D view": "Dimension out of range", "missing padding": "is invalid for input of size 63"}
    for name, words in said.items():
        assert {found[name, "one group"].error for found in visits} == {visits[0][name, "one group"].error}
        assert words in visits[0][name, "one group"].error


def test_without_tensor_parallelism_a_1d_view_raises_nothing_and_is_wrong() -> None:
    scenario, grid = workers.SCENARIOS["one group"], Grid.alone()
    reference = workers.alone(scenario, dp=1)
    assert identical(workers.on_grid(None, scenario, grid)[0], reference)
    parameters, _ = workers.on_grid("1-D view", scenario, grid)
    assert all(difference(parameters, {key: reference[key]}, workers.initial()) > 0.3 for key in reference)


def test_a_1d_view_raises_only_where_tp_cuts_along_dimension_1() -> None:
    scenario = workers.Scenario(groups=(("columns", "whole", "other"),))  # without `rows`
    for seen in launch.run(workers.visit_on_rank, ("1-D view", scenario), dp=workers.DP, tp=workers.TP):
        far = workers.moved(seen.parameters, scenario)
        assert {key for key, distance in far.items() if distance > 0.3} == {"columns", "whole", "other"}
    rows = workers.Scenario(groups=(("rows",),))
    with pytest.raises(launch.WorldError, match="Dimension out of range"):
        launch.run(workers.visit_on_rank, ("1-D view", rows), dp=workers.DP, tp=workers.TP)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("owned piece only", {"rows", "other"}),
        ("wrong tp dim", {"columns", "rows"}),
        ("block-wise Newton–Schulz", {"columns", "rows"}),
    ],
)
def test_only_the_matrices_that_are_cut_come_out_wrong(visits, name: str, wrong: set[str]) -> None:
    far = moved(visits, name, "one group")
    assert {key for key, distance in far.items() if distance > 0.1} == wrong
    assert all(far[key] == 0 for key in far.keys() - wrong)


def test_a_gathered_gradient_takes_a_first_step_that_differs_by_rounding_alone(visits) -> None:
    assert max(moved(visits, "gradient, not momentum", "first step").values()) < 0.05
    assert min(moved(visits, "gradient, not momentum", "one group").values()) > 0.2


def test_a_rank_that_owns_nothing_ends_the_world_of_those_who_wait_for_it() -> None:
    healthy = launch.run(workers.visit_on_rank, (None, workers.LONELY), dp=workers.DP, tp=workers.TP)
    assert all(set(workers.moved(seen.parameters, workers.LONELY).values()) == {0.0} for seen in healthy)
    with pytest.raises(launch.WorldError, match="dp_gather"):
        launch.run(workers.visit_on_rank, ("empty shard", workers.LONELY), dp=workers.DP, tp=workers.TP, timeout=20)


def test_casting_first_turns_large_gradients_into_nan(visits) -> None:
    parameters = visits[0]["cast before normalizing", "large gradients"].parameters
    assert all(value.isnan().all() for value in parameters.values())


@pytest.mark.parametrize("name", EXHIBITS)
def test_an_exhibit_and_the_page_say_alike_where_it_was_seen(name: str) -> None:
    seen = " ".join((EXHIBITS[name].__doc__ or "").partition("Seen: ")[2].split())
    (table,) = (cell for cell in stored_pages.every_cell("11_bug_museum") if "## Where we met them" in cell.source)
    (row,) = (line for line in table.source.splitlines() if line.startswith(f"| {name} |"))
    where, how = row.strip("| ").split(" | ")[1:]
    assert how == next(word for word, says in HOW.items() if says in seen)
    assert all(number in where for number in re.findall(r"#(\d+)", seen)[:1])


def test_an_unknown_exhibit_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        broken("the Mona Lisa", [], Grid.alone())
