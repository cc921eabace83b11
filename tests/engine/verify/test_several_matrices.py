"""Parameters that hold several matrices each, on real worlds: equal to one process to the bit, by every strategy."""

from dataclasses import replace
from typing import Any

import optimizer_cases as cases
import pytest
import several_matrices_workers as work
import torch
from helpers_math import distance, message
from once import once
from torch import Tensor

from distmuon import launch
from distmuon.optim import strategies
from distmuon.sharding.grid import Grid

on_every_grid = pytest.mark.parametrize(("dp", "tp"), [(3, 1), (2, 2)])
WHOLE = [name for name in strategies.names() if name not in work.IN_BLOCKS]


@once
def facts(dp: int, tp: int) -> list[dict[str, Any]]:
    return launch.run(work.facts, dp=dp, tp=tp)


@once
def one_process(name: str, dp: int, tp: int) -> dict[str, Tensor]:
    case = work.absent(tp) if name == "absent" else work.case_of(name, tp)
    (outcome,) = launch.run(cases.train_alone, (case, dp, tp))
    return outcome.values


def different(dp: int, tp: int, run: tuple[str, str], expected: dict[str, Tensor], tolerance: float = 0) -> set[str]:
    """Return the parameters that any rank holds another slice of than that of the expected whole."""
    found = set()
    for rank, fact in enumerate(facts(dp, tp)):
        for w in cases.several(tp).weights:
            mine, slices = fact["values"][run][w.name], cases.cut(expected[w.name], w.dim, tp, rank % tp, w.rows)
            if not (distance(mine, slices) < tolerance if tolerance else torch.equal(mine, slices)):
                found.add(w.name)
    return found


@on_every_grid
@pytest.mark.parametrize("strategy", WHOLE)
def test_every_strategy_ends_to_the_bit_where_one_process_does(dp: int, tp: int, strategy: str) -> None:
    for name in (*work.DTYPES, "absent"):
        assert different(dp, tp, (strategy, name), one_process(name, dp, tp)) == set(), name
    assert different(dp, tp, (strategy, "batched"), one_process("float64", dp, tp), 1e-12) == set()


@on_every_grid
def test_publishing_updates_or_pipelining_changes_no_bit(dp: int, tp: int) -> None:
    for run in (("owner", "updates"), ("owner", "pipelined"), ("gather_all", "pipelined")):
        assert different(dp, tp, run, one_process("float32", dp, tp)) == set(), run


@on_every_grid
@pytest.mark.parametrize("strategy", work.IN_BLOCKS)
def test_in_blocks_it_is_muon_wherever_tp_cuts_no_matrix(dp: int, tp: int, strategy: str) -> None:
    cut = {w.name for w in cases.several(tp).weights if w.dim is not None and w.name != "bias"}
    own = {"experts", "query", "output", "heads of qkv"}  # cut between their matrices
    for name in work.DTYPES:
        found = different(dp, tp, (strategy, name), one_process(name, dp, tp))
        assert found == (cut - own if tp > 1 else set())


@on_every_grid
def test_without_a_gradient_nothing_moves_and_everything_else_has(dp: int, tp: int) -> None:
    expected = one_process("absent", dp, tp)
    for w in cases.several(tp).weights:
        assert torch.equal(expected[w.name], cases.whole_start(w, tp)) == (w.name == work.NEVER)


@on_every_grid
def test_a_saved_run_goes_on_to_the_bit(dp: int, tp: int) -> None:
    assert all(fact["resumed"] == {"gather_all": True, "owner": True} for fact in facts(dp, tp))


# ---- Refusals ---------------------------------------------------------------------------------------------


@on_every_grid
def test_heads_that_the_tp_ranks_cannot_share_are_refused_on_all_of_them(dp: int, tp: int) -> None:
    for fact in facts(dp, tp):
        assert (f"{tp} TP ranks cannot hold 3 matrices in equal parts" in fact["refused"]) == (tp > 1)


def test_the_option_cannot_be_changed_once_the_map_is_laid_out() -> None:
    case = cases.several(1)
    parameters, optimizer = cases.build(case, Grid.alone())
    before = cases.values(parameters)
    changed = "option matrices was changed"
    others = {"whole": changed, ("rows", 5): changed, ("fused", ((16, 1), 8, 8)): changed, "nonsense": "is 'nonsense'"}
    for other, words in others.items():
        kept = optimizer.param_groups[2]["matrices"]
        cases.give(case, Grid.alone(), parameters, 0)
        optimizer.param_groups[2]["matrices"] = other
        with pytest.raises((RuntimeError, ValueError), match=words) as error:
            optimizer.step()
        message(error)
        optimizer.param_groups[2]["matrices"] = kept
    assert all(torch.equal(before[name], value) for name, value in cases.values(parameters).items())
    cases.give(case, Grid.alone(), parameters, 0)
    optimizer.param_groups[2]["matrices"] = ["fused", [16, 8, 8]]  # the same, in other brackets
    optimizer.step()


def test_the_state_of_other_matrices_is_refused() -> None:
    case = cases.several(1)
    groups = [{**group, "matrices": ("rows", 4)} if n == 2 else group for n, group in enumerate(case.groups)]
    _, saver = cases.build(replace(case, groups=tuple(groups)), Grid.alone())
    _, loader = cases.build(case, Grid.alone())
    with pytest.raises(ValueError, match="it has another set of parameters") as error:
        loader.load_state_dict(saver.state_dict())
    message(error)
