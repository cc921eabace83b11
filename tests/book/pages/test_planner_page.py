"""The page on planning: its commands are taken, its listings are theirs, and its sentences follow from both."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
import worlds

from distmuon.optim.newton_schulz import flops
from muonbook.ch18 import divisions
from muonbook.figures import player
from muonbook.measure import results
from muonbook.planner.fabrics import DEVICES, FABRICS, SUSTAINED
from muonbook.planner.model_shapes import MODELS, find_shape
from muonbook.planner.parts.every_rank import Zero1Part
from muonbook.planner.parts.fsdp_worlds import FsdpPart
from muonbook.planner.stages import Degrees
from muonbook.planner.world_plan import WorldPlan, WorldSetting
from tools.pages import plans, published
from tools.pages.plans import PARTS, by_part, frames_of_sizes

PAGE = (worlds.ROOT / "book" / "planner.md").read_text(encoding="utf-8")
EXAMPLE = str(worlds.ROOT / "scripts/examples/my_model.toml")
PROSE = " ".join(PAGE.split())


def listing(name: str) -> str:
    return (worlds.ROOT / "book" / "figures" / name).read_text(encoding="utf-8")


@cache
def trillion(degrees: Degrees, rule: str = "ours") -> WorldPlan:
    """Return the plan of the slider's model on these ranks."""
    return WorldPlan(WorldSetting(find_shape(divisions.MODEL), degrees, rule=rule, sequence_parallel=True))


# ---- Commands and options; test_pages.py runs the commands and compares the listings -----------------------------


def test_every_command_on_the_page_is_followed_by_what_it_prints() -> None:
    commands = re.findall(r"^python scripts/plan\.py .*$", PAGE, re.MULTILINE)
    assert [command for command, _ in plans.COMMAND.findall(PAGE)] == commands
    assert len(commands) == 3


def test_the_table_has_every_option_and_its_default() -> None:
    told = subprocess.run(
        [sys.executable, "scripts/plan.py", "--help"], cwd=worlds.ROOT, check=True, capture_output=True, text=True
    ).stdout
    table = PAGE[PAGE.index("## All options") :]
    assert set(re.findall(r"--[a-z][a-z-]+", table)) == set(re.findall(r"^  (--[a-z-]+)", told, re.MULTILINE))
    for option, default in re.findall(r"^  (--[a-z-]+)[^-]*?\(default:\s+(\w+)\)", told, re.MULTILINE):
        (row,) = (line for line in table.splitlines() if line.startswith("|") and option in line.split("|")[1])
        assert default in row.replace("`", ""), option


def test_the_models_that_are_built_in_are_named() -> None:
    (named,) = re.findall(r"instead of a file: (.*?)\.\n", PAGE)
    assert re.findall(r"`(\w+)`", named) == list(MODELS)


# ---- What the page says of its listings ---------------------------------------------------------------------------


def test_what_the_page_says_of_the_first_plan() -> None:
    shares = dict(re.findall(r"^  ([\w–, ()]+?) +[\d.]+ +([\d.]+)%$", listing("planner_one.txt"), re.MULTILINE))
    assert 85 < float(shares["forward, backward"]) < 90
    assert float(shares["activations (tp)"]) > 0.5 * (100 - float(shares["forward, backward"]))
    assert float(shares["Newton–Schulz"]) < 1


def test_what_the_page_says_of_attentions_own_products() -> None:
    shape = find_shape(EXAMPLE)
    share = 12 * shape.layers * shape.width * shape.context / (6 * shape.active)  # Q @ K.T and scores @ V, both ways
    assert f"they would add {100 * share:.0f} per cent to forward and backward" in PROSE


def test_all_wait_in_every_bucket_and_rings_share_adapters_as_the_page_says() -> None:
    setting = WorldSetting(find_shape(EXAMPLE), Degrees(8, 2), tokens=1 << 20)
    plan, rate = WorldPlan(setting), setting.fabric.flops_per_second
    (part,) = plan.stages[0].parts.values()
    assert isinstance(part, Zero1Part)
    slowest = sum(times * max(load.flops for load in loads) for loads, times in part.world.bucket_groups.items())
    assert f"as long as {slowest / 1e12:.2f} TFLOP here, and not {plan.flops[1] / 1e12:.2f}" in PROSE
    assert plan.seconds["Newton–Schulz"] == pytest.approx(slowest / rate, rel=0.01)
    links = {tp: setting.network.ring(64, tp).bytes_per_second / 1e9 for tp in (1, 2, 4, 8, 16)}
    assert links == {1: 400, 2: 200, 4: 100, 8: 50, 16: 50}
    sent = plan.sent["dp", "gradients"][0] / 1e9
    assert f"this is {links[2]:.0f} GB/s, so {sent:.2f} GB of gradients take {sent / links[2]:.4f} s" in PROSE
    assert sent / links[2] < plan.seconds["gradients"] < 1.03 * sent / links[2]


def test_what_the_page_says_of_divisions() -> None:
    told = listing("planner_divisions.txt")
    assert "28 divisions are possible" in told
    rows = re.findall(r"^ +\d+ +(\d+) +(\d+) +\d+ +[\d.]+ GB +([\d.]+)", told, re.MULTILINE)
    tp, pp, seconds = (sorted({float(row[at]) for row in rows}) for at in range(3))
    assert (len(rows), tp, pp[0], pp[-1]) == (6, [4, 8], 1, 8)
    assert seconds[-1] / seconds[0] < 1.15
    held, most = (
        float(re.findall(rf"^  {kind} +([\d.]+) GB", told, re.M)[0]) for kind in ("activations", "worst moment")
    )
    assert f"activations are {held:.0f} of {most:.0f} GB" in PROSE
    (llama,) = (world for world in results.load("divisions")["worlds"] if world["ranks"] == 512)  # without the option
    fitting = [row["degrees"] for row in llama["divisions"] if row["bytes"] <= llama["room"]]
    assert (len(llama["divisions"]), [degrees[1] for degrees in fitting]) == (28, [8] * 4)


def test_what_the_page_and_chapter_17_say_of_layouts() -> None:
    rows = re.findall(
        r"^    (\w[\w ,]+?) +([\d.]+) +([\d.]+)x .* ([\d.]+) ranks? +([\d.]+) GB$", listing("planner_layouts.txt"), re.M
    )
    layouts = {name: (float(ratio), float(seconds), *map(float, others)) for name, seconds, ratio, *others in rows}
    assert len(layouts) == 5
    assert (round(layouts["gather all, bucketed"][0], 1), round(layouts["gather all, bucketed"][2])) == (1.3, 44)
    assert {layouts[name][0] for name in layouts if name != "gather all, bucketed"} == {1.01, 1.02}
    assert layouts["MuonW"][0] == 1.01  # as chapter 17 says
    assert layouts["MuonW"][1] == max(seconds for _, seconds, *_ in layouts.values())
    assert layouts["MuonW"][3] == min(held for *_, held in layouts.values())
    setting = WorldSetting(MODELS["llama3_8b"], Degrees(64, 2), "adamw", "gather_all", "flat", tokens=4194304)
    seconds = WorldPlan(setting).seconds
    assert f"once in a step, which takes {seconds['gradients'] + seconds['parameters']:.2f} s" in PROSE
    stage = WorldPlan(replace(setting, optimizer="muonw")).stages[0]
    (part,), link = stage.parts.values(), setting.fabric.ring(64, 2)
    assert isinstance(part, FsdpPart)
    assert (setting.micro_batches, part.gathers()["weights"][0], part.gathers()["gradients"][0]) == (8, 2 * 32 + 1, 33)
    twice, once = (
        8 * (calls * 63 * link.alpha_seconds + sent / link.bytes_per_second)
        for calls, _, sent in part.gathers().values()
    )
    assert f"which takes {twice:.2f} and {once:.2f} s" in PROSE
    assert twice + once == pytest.approx(8 * stage.pass_seconds()["FSDP2's gathers (dp)"])


# ---- More and more GPUs --------------------------------------------------------------------------------------------


def test_a_picture_of_plans_shows_every_second_and_byte() -> None:
    sizes = [size for size in results.load("divisions")["sizes"] if size["degrees"]]
    frames = frames_of_sizes(results.load("divisions")["sizes"])
    assert len(frames) == len(sizes) <= len(divisions.SIZES)
    assert "<svg" in player.html("plans", frames)
    for size, frame in zip(sizes, frames, strict=True):
        parts = by_part(size["seconds"])
        assert list(parts) == list(PARTS)
        assert math.isclose(sum(parts.values()), size["step_seconds"], rel_tol=2e-3)
        assert sum(size["held"].values()) <= size["room"]
        assert size["degrees"] in frame.alt


def test_a_part_of_a_step_that_no_colour_stands_for_is_an_error() -> None:
    with pytest.raises(StopIteration):
        by_part({"something new": 1.0})


def test_stored_plans_on_the_slider_are_those_of_todays_planner() -> None:
    """Three divisions planned anew; the puzzle has no quicker one, without sequence parallelism."""
    stored = [size for size in results.load("divisions")["sizes"] if size["degrees"]]
    for size in stored[::2]:
        degrees = Degrees(*map(int, re.findall(r"\d+", size["degrees"])))
        plan = trillion(degrees)
        assert size["held"] == {kind: round(amount) for kind, amount in plan.held_at_worst.items()}
        assert size["seconds"] == {name: float(f"{took:.4g}") for name, took in plan.seconds.items()}
        assert size["step_seconds"] == float(f"{plan.step_seconds:.4g}")
    (kimi,) = (world for world in results.load("divisions")["worlds"] if world["ranks"] == 1024)
    quickest = min(row["seconds"] for row in kimi["divisions"] if row["bytes"] <= kimi["room"])
    assert [size["step_seconds"] < quickest for size in stored if size["ranks"] == 1024] == [True]


def test_what_the_page_says_of_larger_and_larger_worlds_is_stored() -> None:
    sizes = {size["ranks"]: size for size in results.load("divisions")["sizes"]}
    assert 4.5 < sizes[1024]["step_seconds"] / sizes[8192]["step_seconds"] < 5
    shares = [size["seconds"]["Newton–Schulz"] / size["step_seconds"] for size in sizes.values() if size["degrees"]]
    assert [round(each, 2) for each in (shares[0], max(shares), shares[3])] == [0.01, 0.06, 0.06]
    alike = [sizes[ranks] for ranks in (1024, 2048, 4096)]
    assert [size["degrees"].lstrip("0123456789") for size in alike] == [" DP x 8 TP x 16 PP"] * 3
    assert {f"{size['seconds']['bubble']:.2f}" for size in alike} == {"0.40"}
    assert [size["degrees"] for size in (sizes[8192],)] == ["32 DP x 8 TP x 32 PP"]
    sent = [size["seconds"]["gradients"] + size["seconds"]["parameters"] for size in (*alike, sizes[8192])]
    assert sent[:3] == sorted(sent[:3])  # no shorter with more DP ranks
    assert round(sent[2] / sent[3], 1) == 1.9
    larger = trillion(Degrees(64, 8, 16))
    parts = ("bubble", "gradients", "parameters")
    share = sum(larger.seconds[part] for part in parts) / larger.step_seconds
    assert 0.45 < share < 0.5
    assert 1 < larger.step_seconds / sizes[8192]["step_seconds"] < 1.1


def test_what_the_page_says_of_where_a_trillion_parameters_lose_time() -> None:
    model = find_shape(divisions.MODEL)
    (size,) = (size for size in results.load("divisions")["sizes"] if size["ranks"] == 256)
    plan = trillion(Degrees(1, 8, 32))
    took, passes = size["step_seconds"], size["seconds"]["forward, backward"]
    equal = 6 * model.active * plan.setting.tokens / 256 / plan.setting.fabric.flops_per_second
    activations = size["seconds"]["activations (tp)"] + size["seconds"]["activations (pp)"]
    assert f"a step reaches {100 * size['of_the_peak']:.0f} % of the peak, where products reach 40 %" in PROSE
    assert f"would take {equal:.0f} of the {took:.0f} seconds. But the last stage needs {passes - equal:.0f} s" in PROSE
    rest = took - passes - activations
    assert f"Sending activations takes {activations:.0f} s, and the rest {rest:.0f} s" in PROSE
    middle, last = plan.stages[1].weights, plan.stages[-1].weights
    head = model.vocabulary * model.width
    assert (last.numbers, last.layers, middle.layers) == ((31,), 1, 2)
    assert 1 < head / middle.active < 1.1
    assert head < 0.7 * last.active  # so alone on its stage it takes less, as the page says


def test_what_the_page_says_of_buckets_of_experts() -> None:
    ours, flat = (trillion(Degrees(8, 8, 16), rule) for rule in ("ours", "flat"))
    experts = ours.stages[1].parts["expert "]
    assert isinstance(experts, Zero1Part)
    assert {len(rows) for _, rows in experts.world.matrices} == {16}
    times = "it takes {:.2f} s with `--buckets flat`, and not {:.2f}".format(
        *(plan.seconds["Newton–Schulz"] for plan in (flat, ours))
    )
    held = f"holds {flat.fullest[2] / 1e9:.0f} GB in place of {ours.fullest[2] / 1e9:.0f}"
    assert (times in PROSE, held in PROSE) == (True, True)


def test_the_speeds_on_the_page_are_those_of_the_planner() -> None:
    told = plans.assumed()
    for name, device in DEVICES.items():
        assert f"| `{name}` | {device.memory_bytes / 1e9:.0f} GB | {device.peak_flops / 1e12:.0f} TFLOP/s" in told
    assert "| `nvlink_ethernet` | 450 GB/s and 3.4 µs | 1.56 GB/s and 9.6 µs |" in told  # 12.5 GB/s for eight GPUs
    assert all(f"`{name}`" in told for name in FABRICS)


# ---- How far off it was --------------------------------------------------------------------------------------------


def test_what_the_page_says_of_published_figures() -> None:
    added = [figure for figure in published.FIGURES if figure.what == published.ADDED]
    assert [round(figure.planned() / figure.published, 1) for figure in added] == [0.8, 0.3, 1.2, 7.1]
    assert added[1].planned() < added[1].published / 3
    theirs = [100 * share for share in (51 / 1029, 35 / 686)]  # of the passes' operations
    worlds_of = (published.K2, published.QWEN3)
    ours = [
        100 * published.plan(*world).flops[0] * world[1].ranks / (6 * world[0].active * world[2]) for world in worlds_of
    ]
    assert "4 pipeline stages, experts over 64 ranks" in PAGE
    assert [f"we assume {world[2] / 1e6:.3g} million tokens" in PAGE for world in worlds_of] == [True, True]
    assert all(3 < their / our < 4 for their, our in zip(theirs, ours, strict=True))
    shares = "{:.1f} and {:.1f} % of the operations of forward and backward, and in our plans {:.1f} and {:.1f} %"
    assert shares.format(*theirs, *ours) in PAGE
    grown = [100 * figure.planned() * their / our for figure, their, our in zip(added[:2], theirs, ours, strict=True)]
    assert "our plans become {:.1f} and {:.1f} %".format(*grown) in PAGE
    largest = flops((published.QWEN25_7B.width, published.QWEN25_7B.mlp))
    alone = largest / (SUSTAINED * published.A800_PEAK) / published.DMUON_ADAMW
    assert alone == pytest.approx(added[3].planned(), rel=0.01)  # what the slowest owner owns
    millis = [1000 * published.DMUON_ADAMW * share for share in (added[3].published, added[3].planned())]
    assert "Muon adds {:.0f} milliseconds by DMuon's figures and {:.0f} by our plan".format(*millis) in PAGE
    timed = [figure for figure in published.FIGURES if figure.what == published.TIMED]
    longer = published.DMUON_ADAMW * added[2].published
    assert f"alone takes {timed[0].published:.2f} s, but a step with all of it is only {longer:.2f} s longer" in PAGE
    assert len(timed) == 2
    assert all(abs(figure.planned() / figure.published - 1) <= 0.175 for figure in timed)
