"""Chapter 11: its worker's table, what its text says of it, and the tests that the reader is asked to write."""

import importlib
from typing import Any

import pytest
import stored_pages
import torch
import worlds
from test_museum import CAUGHT_BY, RAISES

from distmuon.optim.newton_schulz import newton_schulz
from distmuon.sharding.layout import ParamSpec, plan
from muonbook.ch11.experiments import BUCKET_SIZE, DP, SCENARIOS, SHAPES, TP
from muonbook.ch11.museum import EXHIBITS, without_padding

WORKER = str(worlds.ROOT / "scripts" / "11_bug_museum.py")
KINDS = ("stops", "result", "bytes", "replicas")  # of alarms
PAGE = [cell.source for cell in stored_pages.every_cell("11_bug_museum")]


def table() -> dict[str, list[str]]:
    """Return what the page's table says of every exhibit: four counts and a loss."""
    out = stored_pages.printed("11_bug_museum", "python ../scripts/11_bug_museum.py --json out/11.json")
    return {line[:30].strip(): line[30:].split() for line in out.partition("replicas   loss\n")[2].splitlines()}


def test_the_table_counts_the_alarms_that_the_museum_names() -> None:
    rows = {name: [0 if n == "." else int(n) for n in row[:4]] for name, row in table().items()}
    for name, alarms in CAUGHT_BY.items():
        assert rows[name or "healthy"] == [len(alarms.get(kind, [])) for kind in KINDS], name


def test_a_check_of_the_loss_passes_seven_exhibits_and_three_of_them_look_better() -> None:
    """Quick question 2."""
    losses = {name: row[4] for name, row in table().items()}
    assert losses.pop("1-D view") == "stops"
    healthy = losses.pop("healthy")
    same = {name for name, loss in losses.items() if loss == healthy}
    lower = {name for name, loss in losses.items() if loss < healthy}
    assert same == {"stale group parameters", "missing padding", "empty shard", "cast before normalizing"}
    assert lower == {"block-wise Newton–Schulz", "owned piece only", "gradient, not momentum"}
    assert all(float(losses[name]) > 1.02 * float(healthy) for name in losses.keys() - same - lower)


def test_the_text_counts_exhibits_and_alarms_as_they_are() -> None:
    assert (len(EXHIBITS), len(SCENARIOS)) == (11, 5)
    alarms = [CAUGHT_BY[name] for name in EXHIBITS]
    assert sum(exhibit == RAISES for exhibit in alarms) == 2
    assert [sum(kind in exhibit for exhibit in alarms) for kind in KINDS] == [2, 8, 3, 0]
    assert [name for name in EXHIBITS if not CAUGHT_BY[name]] == ["empty shard"]


def test_every_exhibit_is_shown_or_in_the_table_of_the_others() -> None:
    table = next(cell for cell in PAGE if "## The other five" in cell)
    shown = {name for name in EXHIBITS if f'tour["{name}"]' in "".join(PAGE) or name == "empty shard"}
    others = {name for name in EXHIBITS if f"| `{name}`: " in table}
    assert (len(shown), len(others)) == (6, 5)
    assert shown | others == set(EXHIBITS)


# ---- What the reader is asked to do ------------------------------------------------------------------------


def run(part: str, old: str = "", new: str = "") -> dict[str, Any]:
    """Run the cell that contains `part`, with something changed as the text proposes; return its names."""
    (source,) = (cell for cell in PAGE if part in cell)
    if old:
        assert source.count(old) == 1
        source = source.replace(old, new)
    names: dict[str, Any] = {"torch": torch, "newton_schulz": newton_schulz, "random": torch.Generator().manual_seed(0)}
    exec(source, names)
    return names


def test_a_missing_dp_gather_is_caught_where_the_boundary_cuts_a_matrix() -> None:
    test = run("def updates_of(")["test"]
    for shapes, right in (
        ([(4, 6), (4, 6)], [True, True]),
        ([(6, 4), (3, 8)], [True, True]),
        ([(3, 6), (5, 6)], [True, False]),
    ):
        assert test(shapes, gather=False) == right
        assert test(shapes, gather=True) == [True, True]
    assert test([(4, 6)] * 3, gather=False) == [True, False, True]


def test_matrices_of_128_x_128_would_need_no_padding_and_all_be_cut() -> None:
    """Quick question 1."""
    specs = []
    for name, (_, cut) in SHAPES.items():
        local = tuple(128 // TP if dim == cut else 128 for dim in range(2))
        specs.append(ParamSpec(name, local, "float32", cut))
    layout = plan(specs, DP, BUCKET_SIZE)
    assert without_padding(layout) == layout
    assert [bucket.params for bucket in layout.buckets] == [(0,), (1,), (2,), (3,)]
    assert [len(layout.owners(bucket, *bucket.params)) for bucket in layout.buckets] == [DP] * 4


def test_one_step_from_a_momentum_that_is_not_zero_catches_a_gathered_gradient() -> None:
    as_shown = run("def forgetful(")
    assert as_shown["one_step_test"](as_shown["forgetful"])
    answer = "M = torch.randn(6, 10, generator=random)"
    assert any(f"`{answer}`" in cell for cell in PAGE)
    mended = run("def forgetful(", "M = torch.zeros(6, 10)  # the momentum before the step", answer)
    assert not mended["one_step_test"](mended["forgetful"])
    assert mended["one_step_test"](mended["muon"])


def test_two_micro_batches_with_the_same_gradient_step_in_the_right_direction_and_twice_as_far() -> None:
    names = run("longer = ", ', "unrelated": other')
    assert float(names["cosine"]) == pytest.approx(1, abs=1e-3)
    assert float(names["longer"]) == pytest.approx(2, abs=1e-2)


# ---- The worker ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Block-Wise Newton-Schulz", "block-wise Newton–Schulz"])
def test_an_exhibit_is_found_however_it_is_spelled(name: str) -> None:
    assert importlib.import_module("11_bug_museum").exhibit_name(name, list(EXHIBITS)) == "block-wise Newton–Schulz"


def test_an_unknown_exhibit_is_answered_with_those_there_are() -> None:
    done = worlds.answer(WORKER, "--exhibit", "the Mona Lisa")
    assert done.code == 2
    assert "'the Mona Lisa' is not in the museum; choose one of healthy, stale group parameters" in done.err
