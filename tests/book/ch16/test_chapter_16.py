"""Chapter 16: the ladder on other grids, a trillion parameters, and what the page says of both."""

from __future__ import annotations

import re

import pytest
import stored_pages
import worlds

from distmuon import launch
from muonbook.ch16 import ablation_steps, figure_balance, figure_work, trillion
from muonbook.measure import results

WORKER = str(worlds.ROOT / "scripts" / "16_owner.py")


def rows(out: str) -> dict[str, tuple[float, ...]]:
    """Return rung -> its numbers."""
    found = re.findall(
        r"^(\d [\w, -]+?)  +([\d.]+) x +([\d.]+|-)(?: times)? +([\d.]+|-)(?: x)? +([\d.]+) MB +([\d.]+) x$", out, re.M
    )
    return {name: tuple(float(number.replace("-", "0")) for number in numbers) for name, *numbers in found}


@pytest.mark.parametrize("grid", ["--dp 4 --tp 2", "--dp 8 --tp 1"])
def test_every_rung_costs_no_more_than_the_one_before(grid: str) -> None:
    out = stored_pages.printed("16_owner", f"python ../scripts/16_owner.py {grid}")
    assert out.splitlines()[-1].endswith("those predicted: True.")
    table = rows(out)
    assert list(table) == [ablation_steps.ADAMW, *ablation_steps.ABLATION_STEPS]
    _, buckets, flat, cut, owner, updates = table.values()
    assert updates[0] < 1 <= owner[0] < cut[0] < min(flat[0], buckets[0])
    assert owner[1:3] == updates[1:3] == (1, 1)
    assert cut[1] == flat[1] < buckets[1]
    assert flat[3] > buckets[3]


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (3, 1), (1, 2), (2, 2)])
def test_on_any_grid_bytes_and_operations_are_those_predicted(dp: int, tp: int) -> None:
    ranks = launch.run(ablation_steps.take_steps, dp=dp, tp=tp)[0]
    assert len(ranks) == dp * tp
    assert ablation_steps.all_as_predicted(ranks)
    for name, step in ablation_steps.ABLATION_STEPS.items():
        work = sum(rank[name].flops for rank in ranks)
        assert work == ablation_steps.once() if step.strategy == "owner" else work >= ablation_steps.once()


def test_a_wrong_count_is_not_as_predicted() -> None:
    ranks = launch.run(ablation_steps.take_steps)[0]
    ranks[0][ablation_steps.ADAMW] = ranks[0][ablation_steps.ADAMW]._replace(as_predicted=False)
    assert not ablation_steps.all_as_predicted(ranks)
    assert ablation_steps.lines(ranks)[-1].endswith("False.")


def test_heads_that_cannot_be_shared_out_are_refused_in_a_sentence() -> None:
    ending = worlds.answer(WORKER, "--tp", "3")
    assert ending.code == 2
    assert "--tp 3 does not divide the model's 8 heads; choose 1, 2, 4 or 8." in ending.err


def test_a_trillion_parameters_are_planned_in_no_time() -> None:
    out = stored_pages.printed("16_owner", "python ../scripts/16_owner.py --trillion")
    assert "69,607 matrices for 1,024 x 8 ranks" in out
    assert trillion.MODEL.parameters > 1e12
    plan = results.load("step")["trillion"]  # of the stored file: no time is taken here
    assert plan["seconds"] < 10
    assert plan["bytes"] < 2e9


def test_every_spectrum_is_safe_in_the_stored_sweep() -> None:
    swept = results.load("step")["spectra"]
    assert len(swept) >= 28
    for row in swept:
        assert row["gram"] <= row["bound"]
        assert row["wide"] < 1e-3 < row["plain"]


# ---- Pictures ---------------------------------------------------------------------------------------------


def test_a_scene_tells_how_much_each_rank_does() -> None:
    frames = figure_work.frames_of_work()
    assert len(frames) == len(figure_work.SCENES)
    shares = [
        [float(share) for share in re.findall(r"[\d,]+ ([\d.]+)[,.]", frame.alt.split("%: ")[1])] for frame in frames
    ]
    assert [len(row) for row in shares] == [scene.dp * scene.tp for scene in figure_work.SCENES]
    for scene, row in zip(figure_work.SCENES, shares, strict=True):
        assert sum(row) == pytest.approx(100) if scene.strategy == "owner" else sum(row) >= 100
    assert shares[5] == [100] * 8


def test_the_slowest_of_a_balance_is_never_below_its_fair_share() -> None:
    costs = {0: 5.0, 1: 3.0, 2: 3.0, 3: 1.0}
    assert sorted(figure_balance.loads(costs, 2)) == [6, 6]
    frames = figure_balance.frames_of_balance(costs, (2, 3, 8))
    assert "1.00 of its fair share, 0 have nothing" in frames[0].alt
    assert "1.25 of its fair share, 0 have nothing" in frames[1].alt
    assert "4 have nothing" in frames[2].alt
    assert frames[2].caption.startswith("8 ranks: 4 have nothing to do.")
