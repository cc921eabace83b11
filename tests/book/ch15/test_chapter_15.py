"""Chapter 15's worker and its measurements: bytes on four grids, shares, repeated work, and what its tables say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stored_pages
import worlds

from distmuon import launch
from distmuon.optim.newton_schulz import flops
from muonbook.ch15 import regime_tables, regimes, timed_steps
from muonbook.ch15.contenders import contender
from muonbook.ch15.cost_fit import FITTED_ENTRANTS, FITTED_RATES, Constants
from muonbook.measure import results
from muonbook.measure.baselines import BASELINES
from muonbook.measure.muon_variants import MUON_VARIANTS
from muonbook.measure.workload import SHAPES, TIMED, Workload

WORKER = str(worlds.ROOT / "scripts" / "15_regimes.py")


def test_skewed_grids_send_what_was_predicted() -> None:
    out = stored_pages.printed("15_regimes", "python ../scripts/15_regimes.py --skew")
    assert out.count("\n") == 6
    rows = re.findall(r"^ +(\d) x +(\d) +([\d,]+(?: +[\d,]+){5}) +(True|False)$", out, re.MULTILINE)
    assert [(int(dp), int(tp)) for dp, tp, *_ in rows] == list(regimes.GRIDS)
    assert {equal for *_, equal in rows} == {"True"}
    zero1, ddp, bucketed, flat, cut, owner = (int(cell.replace(",", "")) for cell in rows[0][2].split())
    assert 1.24 < bucketed / zero1 < 1.25  # the head's and the embedding's bytes do not grow
    assert (f"{flat / zero1:.2f}", owner) == ("1.25", zero1)
    assert owner < cut < 1.02 * zero1
    assert zero1 == pytest.approx(ddp, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "choose one of --skew, --measure"),
        (["--skew", "--worlds"], "choose one of --skew, --measure"),
        (["--measure"], "need --json FILE"),
        (["--check", "nowhere.py"], "nowhere.py"),
    ],
)
def test_what_does_not_fit_is_answered_in_a_sentence(arguments: list[str], words: str) -> None:
    ending = worlds.answer(WORKER, *arguments)
    assert ending.code == 2
    assert words in ending.err


def test_worlds_are_planned_without_a_process(tmp_path: Path) -> None:
    ending = worlds.finish(WORKER, "--worlds", "--quick", "--json", str(tmp_path / "new" / "worlds.json"))
    assert (ending.code, ending.err) == (0, "")
    assert json.loads((tmp_path / "new" / "worlds.json").read_text())["cells"]


# ---- Measuring --------------------------------------------------------------------------------------------


def test_batches_double() -> None:
    assert regimes.token_counts(512) == [64, 128, 256, 512]
    assert regimes.token_counts(700) == [64, 128, 256, 512]


def test_a_share_is_measured_per_batch() -> None:
    found = launch.run(timed_steps.optimizer_share, (32, regimes.token_counts(1024), 1))[0]
    assert found.keys() == {"muon", "adamw"}
    assert all(
        len(shares) == 5 and all(len(each) == 1 and min(each) > 0 for each in shares) for shares in found.values()
    )


def test_the_slowest_rank_of_a_round_counts_and_rounds_are_compared_in_pairs() -> None:
    ranks = [
        {"muon": {"seconds": [3.0, 2.0, 8.0]}, "zero1": {"seconds": [1.0, 2.0, 3.0]}},
        {"muon": {"seconds": [1.0, 6.0, 4.0]}, "zero1": {"seconds": [1.5, 1.0, 4.0]}},
    ]
    assert regimes.slowest(ranks, "muon") == [3, 6, 8]
    assert regimes.ratios(ranks, "muon", "zero1") == {"median": 2, "quartiles": [2, 2.5], "count": 3, "range": [2, 3]}


def demand(variant: regimes.Variant) -> dict[str, int]:
    workload, timed = replace(regimes.LINKED, bucket_size=variant.bucket_size), contender(variant.contender)
    ledger = timed.predict(workload, regimes.RANKS, 1, (0, 0))
    return timed_steps.demand(ledger, {"dp": regimes.RANKS, "world": regimes.RANKS})


def test_what_a_step_asks_of_the_link() -> None:
    whole, cut, ddp = (demand(regimes.LINKS[name]) for name in ("zero1", "zero1_small", "ddp"))
    assert ddp["exchange_bytes"] == 0
    assert ddp["messages"] == 2 * (regimes.RANKS - 1)
    assert whole["exchange_bytes"] == pytest.approx(ddp["ring_bytes"] / 2, rel=1e-3)
    assert whole["exchange_bytes"] == pytest.approx(cut["exchange_bytes"], rel=1e-3)
    assert cut["messages"] > 2 * whole["messages"]


def test_what_a_boundary_cuts_goes_straight_to_its_other_owners() -> None:
    zero1, flat, cut, owner = (demand(regimes.LINKS[name]) for name in ("zero1", "muon_flat", "muon_cut", "muon_owner"))
    assert flat["exchange_bytes"] == pytest.approx(zero1["exchange_bytes"], rel=1e-3)
    assert cut["exchange_bytes"] > flat["exchange_bytes"]
    assert cut["ring_bytes"] == pytest.approx(zero1["ring_bytes"], rel=1e-3)
    assert owner["exchange_bytes"] / zero1["exchange_bytes"] == pytest.approx(
        owner["ring_bytes"] / zero1["ring_bytes"], rel=1e-2
    )


def test_whoever_is_timed_is_one_of_ours_or_of_the_baselines_that_can_be_predicted() -> None:
    assert {variant.contender for variant in regimes.LINKS.values()} <= MUON_VARIANTS.keys() | BASELINES.keys()
    assert contender("ddp").ddp_alone
    assert not contender("muon_owner").ddp_alone
    with pytest.raises(KeyError):
        contender("nobody")
    with pytest.raises(ValueError, match="it can only be counted"):
        contender("muon_fsdp2").predict(regimes.LINKED, regimes.RANKS, 1, (0, 0))


# ---- Tables -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64)])
def test_the_bound_is_a_bound(shape: tuple[int, int]) -> None:
    tokens = 1000
    share = flops(shape) / (6 * shape[0] * shape[1] * tokens)
    assert share <= regime_tables.most_share(min(shape), tokens) * (1 + 1e-12)
    assert (share == pytest.approx(regime_tables.most_share(min(shape), tokens))) == (shape[0] == shape[1])


@pytest.mark.parametrize("workload", [TIMED.shared_by(8), SHAPES["even"]])
def test_repeated_work(workload: Workload) -> None:
    assert regime_tables.repeated(workload, 1, 1) == (1, 1)
    assert regime_tables.repeated(workload, 1, 8) == (8, 8)  # TP ranks all do everything
    mean, busiest = regime_tables.repeated(workload, 8, 1)
    assert 1 < mean <= busiest <= 8


def spread(value: float) -> dict[str, Any]:
    return {"median": value, "quartiles": [value, value], "count": 1, "range": [value, value]}


def test_a_share_that_halves_where_the_batch_doubles_has_the_bounds_slope() -> None:
    shares = {"tokens": [64, 128, 256], "muon": [spread(x) for x in (0.4, 0.2, 0.1)]}
    assert regime_tables.slope({"share": {"8": shares}}, 8) == pytest.approx(-1)


def test_of_few_rounds_the_range_is_shown_and_of_many_the_quartiles() -> None:
    few, many = ([float(x) for x in range(n)] for n in (7, 9))
    rounds = {30: regimes.spread(few), 100: regimes.spread(many)}
    steps = [{"rate_mbit": rate, "muon": {"over_zero1": spread}} for rate, spread in rounds.items()]
    asked = {"ring_bytes": 1, "exchange_bytes": 0, "computation_seconds": {"median": 1.0}}
    lines = regime_tables.link_lines({"links": {"steps": steps, "entrants": dict.fromkeys(("muon", "zero1"), asked)}})
    assert lines[-2].split() == ["bucketed", "3.00", "0.00-6.00", "4.00", "2.00-6.00"]


def test_the_quickest_grid_is_another_one_in_the_paper_s_layout_as_the_claims_page_says() -> None:
    rows = results.load("regimes")["skew"]
    seconds = {name: {(row["dp"], row["tp"]): row[name]["seconds"]["median"] for row in rows} for name in regimes.SKEW}
    quickest = {name: min(of, key=lambda grid: of[grid]) for name, of in seconds.items()}
    assert (quickest["muon"], quickest["muon_cut"]) == ((4, 2), (8, 1))


def test_clocked_grids_are_the_stored_medians_by_title() -> None:
    found = results.load("regimes")
    clocks = regime_tables.clocked_grids(found)
    assert list(clocks) == [f"{dp} DP × {tp} TP" for dp, tp in regimes.GRIDS]
    assert all(list(row) == ["bucketed", "flat", "flat + cut", "owner"] for row in clocks.values())
    assert clocks["4 DP × 2 TP"]["owner"] == found["skew"][1]["muon_owner"]["over_zero1"]["median"]


def test_bytes_over_links_are_shares_of_adamws() -> None:
    sent = regime_tables.link_bytes(results.load("regimes"))
    assert {title: round(share) for title, share in sent.items()} == {
        "AdamW, ZeRO-1": 100, "bucketed": 125, "flat": 125, "flat + cut": 103, "owner": 100,
    }  # fmt: skip


def test_parts_of_a_step_over_a_link_add_up_to_the_ratio_that_is_told() -> None:
    found = results.load("regimes")
    parts = regime_tables.link_parts(found)
    assert list(parts) == ["30 Mbit", "100 Mbit", "300 Mbit", "1000 Mbit", "no limit"]
    for step, rows in zip(found["links"]["steps"], parts.values(), strict=True):
        assert sum(rows["AdamW, ZeRO-1"].values()) == pytest.approx(100)
        alone = {name: asked["computation_seconds"]["median"] for name, asked in found["links"]["entrants"].items()}
        for name in regimes.ALGORITHMS:
            row = rows[regime_tables.NAMES[name]]
            assert sum(row.values()) == pytest.approx(100 * step[name]["over_zero1"]["median"])
            ratio = row["computing"] / rows["AdamW, ZeRO-1"]["computing"]
            assert ratio == pytest.approx(alone[name] / alone["zero1"])
        assert all(part > 0 for row in rows.values() for part in row.values())


@pytest.mark.parametrize("lines", ["share_lines", "skew_lines", "link_lines", "error_lines"])
def test_the_stored_measurements_fit_the_page(lines: str) -> None:
    printed = getattr(regime_tables, lines)(results.load("regimes"))
    assert len(printed) > 3
    assert max(map(len, printed)) <= 100


def test_the_model_is_held_against_points_that_it_has_not_seen() -> None:
    constants, left = regime_tables.fitted(results.load("regimes"))
    assert isinstance(constants, Constants)
    assert left
    assert all(p.entrant not in FITTED_ENTRANTS or p.rate_mbit not in FITTED_RATES for p in left)
    assert "all held out" in regime_tables.held_out(constants, left)
