"""The museum: the healthy code passes every check, and each broken variant fails exactly those that are named here."""

import re

import pytest
import stored_pages
import torch

from distmuon import launch
from distmuon.sharding.grid import Grid
from distmuon.verify.certificate import difference, identical
from muonbook.ch11 import experiments
from muonbook.ch11.museum import EXHIBITS, broken

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = list(experiments.SCENARIOS)
RAISES = {"stops": ALL}
RESULTS = {"result": ALL}  # not bitwise equal to single-device Muon
RESULTS_AND_BYTES = {"result": ALL, "bytes": ALL}  # and a rank has counted others than were predicted

CAUGHT_BY: dict[str | None, dict[str, list[str]]] = {
    None: {},
    "stale group parameters": {"result": ["two groups"]},
    "1-D view": RAISES,
    "missing padding": RAISES,
    "wrong tp dim": RESULTS,
    "block-wise Newton–Schulz": RESULTS_AND_BYTES,
    "owned piece only": RESULTS_AND_BYTES,
    "empty shard": {},  # every rank owns a piece in these scenarios; the page shows what a lonely rank does
    "gradient, not momentum": RESULTS,
    "no Newton–Schulz": RESULTS,
    "cast before normalizing": {"result": ["large gradients"]},
    "once per micro-batch": {"result": ["two micro-batches"], "bytes": ["two micro-batches"]},
}
WITHOUT_ROWS = experiments.Scenario(groups=(("columns", "whole", "other"),))
HOW = {"ours": "nowhere in public", "run": "run)", "reported": "reported", "read": "read"}  # the first that "Seen" has


def visit_all(world: launch.World) -> dict[tuple[str | None, str], experiments.Visit]:
    grid = Grid.of(world)
    seen = experiments.visit_all([None, *EXHIBITS], grid)
    seen["1-D view", "without rows"] = experiments.visit("1-D view", WITHOUT_ROWS, grid)
    seen[None, "lonely"] = experiments.visit(None, experiments.LONELY, grid)
    return seen


@pytest.fixture(scope="module")
def visits() -> list[dict[tuple[str | None, str], experiments.Visit]]:
    """Every exhibit in every scenario, on one 2 x 2 grid: one dict per rank."""
    return launch.run(visit_all, dp=experiments.DP, tp=experiments.TP)


@pytest.mark.parametrize("name", [None, *EXHIBITS], ids=lambda name: name or "the healthy code")
def test_exactly_the_named_checks_catch_it(visits, name: str | None) -> None:
    off = {alarm: labels for alarm, labels in experiments.alarms(name, visits).items() if labels}
    assert off == CAUGHT_BY[name]
    for label in off.get("stops", []):  # all ranks, with the same words
        assert len({seen[name, label].error for seen in visits}) == 1


def moved(visits, name: str, label: str) -> dict[str, float]:
    return experiments.moved(visits[0][name, label].parameters, experiments.SCENARIOS[label])


def test_with_stale_parameters_the_first_group_stands_still_and_the_second_moves_twice(visits) -> None:
    parameters = visits[0]["stale group parameters", "two groups"].parameters
    start = experiments.initial()
    assert all(torch.equal(parameters[key], start[key]) for key in ("columns", "rows"))
    far = moved(visits, "stale group parameters", "two groups")
    assert far["whole"] == pytest.approx(10, rel=0.02)  # once more, with the first group's tenfold learning rate


def test_a_1d_view_raises_only_where_tp_cuts_along_dimension_1_and_else_is_wrong(visits) -> None:
    assert "Dimension out of range" in visits[0]["1-D view", "one group"].error
    far = experiments.moved(visits[0]["1-D view", "without rows"].parameters, WITHOUT_ROWS)
    assert {key for key, distance in far.items() if distance > 0.3} == {"columns", "whole", "other"}
    scenario, grid = experiments.SCENARIOS["one group"], Grid.alone()
    reference = experiments.alone(scenario, dp=1)
    assert identical(experiments.on_grid(None, scenario, grid)[0], reference)
    parameters, _ = experiments.on_grid("1-D view", scenario, grid)
    assert all(difference(parameters, {key: reference[key]}, experiments.initial()) > 0.3 for key in reference)


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


def test_casting_first_turns_large_gradients_into_nan_and_a_lonely_rank_is_right_in_the_healthy_code(visits) -> None:
    parameters = visits[0]["cast before normalizing", "large gradients"].parameters
    assert all(value.isnan().all() for value in parameters.values())
    for seen in visits:
        assert set(experiments.moved(seen[None, "lonely"].parameters, experiments.LONELY).values()) == {0.0}


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
