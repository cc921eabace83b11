"""scripts/plan.py: what it prints, writes and refuses; that thousands of ranks are planned in seconds."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import worlds

from distmuon.launch import UsageError
from distmuon.optim.strategies.periodic import OPTIONS
from muonbook.ch15.survey import rows as rows_of
from muonbook.figures.style import in_bytes
from muonbook.measure import results
from muonbook.planner.model_shapes import MODELS, Experts, Latent, find_shape
from muonbook.planner.planned_baselines import PLANNED_BASELINES
from muonbook.planner.world_plan import KEPT, MOMENTS

WORKER = str(worlds.ROOT / "scripts" / "plan.py")
OWN = """
layers = 4
width = 256
heads = 4
key_heads = 2
mlp = 512
vocabulary = 1000
context = 128
[experts]
routed = 8
active = 2
width = 128
shared = 128
dense_layers = 0
"""


def planned(*arguments: str) -> str:
    ending = worlds.answer(WORKER, *arguments)
    assert (ending.code, ending.err) == (0, "")
    return ending.out


def test_a_plan_is_told_in_thirty_lines_and_written(tmp_path: Path) -> None:
    out = tmp_path / "new" / "plan.json"
    given = ["--model", "moonlight", "--dp", "16", "--tp", "2", "--pp", "2", "--ep", "4"]
    printed = planned(*given, "--json", str(out)).splitlines()
    assert len(printed) <= 30
    assert max(map(len, printed)) <= 120
    assert printed[0] == "Moonlight, 16 billion parameters, on 64 ranks: 16 DP x 2 TP x 2 PP, 4 EP"
    (plan,) = json.loads(out.read_text())["plans"]
    assert (plan["ranks"], plan["strategy"], plan["fits"]) == (64, "owner", True)
    assert sum(plan["seconds"].values()) == pytest.approx(plan["step_seconds"], rel=1e-3)
    there = max(sum(plan["held"][kind] for kind in kinds) for kinds in MOMENTS.values())
    worst = sum(plan["held"][kind] for kind in KEPT) + there
    assert worst == pytest.approx(plan["fullest"]["bytes"], abs=len(plan["held"]))


@pytest.mark.parametrize(
    "line",
    [
        "--model llama2_7b --dp 8 --optimizer adamw",
        "--model llama2_7b --dp 8 --strategy gather_all --buckets megatron",
        "--model llama2_7b --dp 8 --tp 2 --strategy gather_cut --buckets flat --device a100",
        "--model llama2_7b --dp 8 --tp 2 --strategy blockwise",
        "--model moonlight --dp 16 --tp 2 --ep 16 --optimizer muonw --fabric nvlink_ethernet",
        "--model llama3_70b --dp 16 --tp 8 --pp 4 --recompute --sequence-parallel",
    ],
)
def test_every_optimizer_is_told_in_thirty_lines(line: str) -> None:
    printed = planned(*line.split()).splitlines()
    assert len(printed) <= 30
    assert re.search(r"Seconds of a step: [\d.]+, \d+% of the peak in the model", "\n".join(printed))


def test_a_strategy_of_the_readers_own_is_priced_by_its_costs(tmp_path: Path) -> None:
    mine, line = tmp_path / "mine.py", ["--model", "gpt2", "--dp", "4", "--tp", "2", "--tokens", "65536"]
    mine.write_text("from distmuon.optim.strategies import gather_all\n\nSTRATEGY = gather_all.GatherAll\n")
    ending = worlds.answer(WORKER, *line, "--strategy", str(mine))
    assert (ending.code, ending.out) == (2, "")
    assert ending.err.startswith(f"error: --strategy {mine}: ")
    assert ending.err.endswith("of which nothing is predicted; give its file COSTS.\n")
    mine.write_text(mine.read_text() + "COSTS = gather_all.COSTS\n")
    assert planned(*line, "--strategy", str(mine)) == planned(*line, "--strategy", "gather_all").replace(
        "Muon, gather_all", f"Muon, {mine}"
    )


@pytest.mark.parametrize(
    ("costs", "says"),
    [
        ("COSTS = 5", "whose COSTS are 5; make them StrategyCosts(sends, allocates)."),
        (
            "COSTS = COSTS._replace(tasks=None)",
            "whose work is not known; give its COSTS `tasks`.",
        ),
        (
            'COSTS = COSTS._replace(sends=lambda ledger, at: ledger.record("all_reduce", "world", 8, 8, "all"))',
            "which sends in the group 'world'; only moves over 'dp' and 'tp' can be planned.",
        ),
        (
            'COSTS = COSTS._replace(sends=lambda ledger, at: ledger.record("all_to_one", "dp", 4, 8, "all"))',
            "no ring formula for 'all_to_one'; known collectives: all_gather,",
        ),
        (
            "COSTS = COSTS._replace(tasks=lambda layout, muon, tp: [Task(len(layout.specs), [], [(0, 0)])])",
            "whose `tasks` name parameter 196, which is none of Muon's; give indices of `muon`.",
        ),
        (
            "COSTS = COSTS._replace(tasks=lambda layout, muon, tp: [Task(min(muon), [], [(0, 2)])])",
            "whose `tasks` name the rank (dp 0, tp 2) of a grid of 4 x 2; ranks count from 0.",
        ),
        (
            "COSTS = COSTS._replace(tasks=lambda layout, muon, tp: [Task(min(muon), [], [(-1, 0)])])",
            "whose `tasks` name the rank (dp -1, tp 0) of a grid of 4 x 2; ranks count from 0.",
        ),
        ("STRATEGY = Task", "its class lacks plan, options,"),
    ],
)
def test_costs_of_the_readers_own_that_cannot_be_are_answered_in_a_sentence(
    tmp_path: Path, costs: str, says: str
) -> None:
    mine = tmp_path / "mine.py"
    imports = "from distmuon.optim.strategies.costs import Task\n"
    named = "from distmuon.optim.strategies.gather_all import COSTS, STRATEGY\n\nSTRATEGY = STRATEGY\n"
    mine.write_text(imports + named + costs + "\n")
    line = f"--model gpt2 --dp 4 --tp 2 --tokens 65536 --strategy {mine}"
    ending = worlds.answer(WORKER, *line.split())
    assert (ending.code, ending.out) == (2, "")
    assert ending.err.startswith(f"error: --strategy {mine}: {says}")
    assert ending.err.count("\n") == 1


def test_a_plan_says_of_which_steps_it_is_the_mean() -> None:
    line = "--model gpt2 --dp 2 --tp 2 --tokens 65536 --strategy"
    told = "Muon, periodic (mean of the 5 steps of its default period), buckets: ours; on H100"
    assert OPTIONS["whole_every"] == 5
    assert planned(*line.split(), "periodic").splitlines()[1].startswith(told)
    assert planned(*line.split(), "blockwise").splitlines()[1].startswith("Muon, blockwise, buckets: ours; on H100")


def test_one_rank_is_one() -> None:
    line = "--model gpt2 --tokens 4096"
    assert planned(*line.split(), "--dp", "1").startswith("GPT-2, 0.124 billion parameters, on 1 rank: 1 DP x 1 TP\n")
    assert planned(*line.split(), "--ranks", "1").startswith("GPT-2 on 1 rank; Muon, owner")


def test_a_plan_says_how_much_is_padding_where_it_is_not_little(tmp_path: Path) -> None:
    """On 64 ranks GPT-2's largest hidden matrix makes every shard as long as itself; without Muon they are even."""
    out, line = tmp_path / "plan.json", "--model gpt2 --dp 64 --tokens 65536"
    printed = planned(*line.split(), "--json", str(out))
    (plan,) = json.loads(out.read_text())["plans"]
    shape = MODELS["gpt2"]
    elements = sum(math.prod(weight.shape) for weight in shape.weights())
    largest = max(math.prod(weight.shape) for weight in shape.weights() if weight.muon)
    hidden = sum(math.prod(weight.shape) for weight in shape.weights() if weight.muon)
    assert plan["padding"] == pytest.approx((2 + 4) * (64 * largest - hidden), rel=1e-4)  # bf16, and float32
    told = (
        f"of both, {in_bytes(plan['padding'])} is padding ({plan['padding'] / 6 / elements:.1%}); gather_cut, or fewer"
    )
    assert told in printed
    assert max(map(len, printed.splitlines())) <= 120
    for even in (f"{line} --optimizer adamw", f"{line} --strategy gather_all", "--model gpt2 --dp 4 --tokens 65536"):
        assert "padding" not in planned(*even.split())


def test_ranks_alone_search(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    printed = planned("--model", "llama2_7b", "--ranks", "64", "--json", str(out)).splitlines()
    assert len(printed) <= 30
    plans = json.loads(out.read_text())["plans"]
    rows = re.findall(r"^ +(\d+) +(\d+) +(\d+) +(\d+) +[\d.]+ GB", "\n".join(printed), re.MULTILINE)
    assert [tuple(map(int, row)) for row in rows] == [tuple(p[n] for n in ("dp", "tp", "pp", "ep")) for p in plans]


def test_every_algorithm_is_compared_as_the_survey_plans_it(tmp_path: Path) -> None:
    out, stored = tmp_path / "compared.json", results.load("worlds")
    world = "--model llama3_70b --dp 128 --tp 8 --tokens 4194304 --recompute"
    printed = planned(*world.split(), "--compare", "--json", str(out)).splitlines()
    rows = {row["baseline"]: row for row in json.loads(out.read_text())["baselines"]}
    assert list(rows) == [each.title for each in PLANNED_BASELINES.values()] == list(stored["baselines"].values())
    place = {"model": "llama3_70b", "ranks": 1024}
    lines = [line for line in printed[3:] if line.startswith("    ")]
    for line, (name, title) in zip(lines, stored["baselines"].items(), strict=True):
        (cell,) = rows_of(stored["cells"], **place, tokens=1 << 22, fabric="nvlink_infiniband", baseline=name)
        assert line.startswith(f"    {title} ")
        above = next(row for row in reversed(printed[: printed.index(line)]) if row.startswith("  AdamW"))
        seconds, adamws = (re.findall(r" ([\d.]+) ", row)[0] for row in (line, above))
        assert f" {rows[title]['over_adamw']:.2f}x" in line
        assert float(seconds) / float(adamws) == pytest.approx(rows[title]["over_adamw"], rel=0.01)
        assert f" {rows[title]['seconds']['Newton–Schulz']:.3g} " in line
        assert ("no room" in line) == (not rows[title]["fits"])
        if cell["tp"] == 8 and name != "muonw":
            assert rows[title]["over_adamw"] == pytest.approx(cell["over_adamw"], rel=1e-3)
    assert rows["owner"]["repeats"] == rows["MuonW"]["repeats"] == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--model gpt5", "--model gpt5: choose one of gpt2, llama3_8b,"),
        ("--model nowhere.toml", "--model nowhere.toml: cannot be read (No such file or directory)"),
        ("--optimizer sgd", "--optimizer sgd: choose one of adamw, muon, muonw."),
        (
            "--strategy mine",
            "--strategy mine: choose one of blockwise, gather_all, gather_cut, owner, periodic, or the",
        ),
        ("--buckets small", "--buckets small: choose one of ours, megatron, flat."),
        ("--device tpu", "--device tpu: choose one of a100, h100, h200."),
        ("--fabric string", "--fabric string: choose one of nvlink_infiniband,"),
        ("--dp 4 --ranks 6", "--ranks 6: --dp 4 x --tp 1 x --pp 1 is 4 ranks; leave --ranks out, or make them agree."),
        ("--tp 4 --ranks 6", "--ranks 6: --tp 4 x --pp 1 does not divide that; leave --ranks out"),
        ("--tp 32", "--tp 32 does not divide what Moonlight has to be cut, 16 heads"),
        ("--dp 3 --ep 3", "--ep 3 does not divide the 64 experts of Moonlight; choose one of 1, 2, 4,"),
        ("--dp 6 --ep 4", "--dp 6 is not a multiple of --ep 4"),
        ("--model gpt2 --ep 2", "--ep 2: GPT-2 has no experts to share out; leave --ep out."),
        ("--pp 28", "--pp 28: Moonlight has 27 layers"),
        ("--sequence-parallel", "--sequence-parallel does nothing with --tp 1; choose a larger T, or leave it out."),
        ("--tokens 100", "--tokens 100 are fewer than a sequence of 8,192"),
        ("--measure", "--measure writes a file; add --json FILE."),
    ],
)
def test_what_cannot_be_is_answered_in_a_sentence(line: str, says: str) -> None:
    ending = worlds.answer(WORKER, *line.split())
    assert (ending.code, ending.out) == (2, "")
    assert ending.err.startswith(f"error: {says}")
    assert ending.err.count("\n") == 1


def test_a_trillion_parameters_on_8192_ranks_were_planned_within_the_limits() -> None:
    """Stored by `plan.py --measure`, in a process with a core for itself."""
    stored = results.load("planner")["planning"]
    assert stored["seconds"] < 10
    assert stored["bytes"] < 2e9


# ---- A shape of one's own -------------------------------------------------------------------------------------


def test_a_shape_of_ones_own_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(OWN)
    shape = find_shape(str(tmp_path / "mine.toml"))
    assert (shape.title, shape.layers, shape.gated) == ("mine", 4, True)
    assert shape.experts == Experts(8, 2, 128, 128, 0)
    latent = OWN + "[latent]\nrank = 64\nrotary = 16\n"
    (tmp_path / "mine.toml").write_text(latent)
    assert find_shape(str(tmp_path / "mine.toml")).latent == Latent(64, 16)
    assert find_shape("gpt2") is MODELS["gpt2"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layers = ", "is no TOML"),
        ("", "layers, width, heads, key_heads, mlp, vocabulary, context is missing; add it."),
        (OWN.replace("layers = 4\n", "layer = 4\n", 1), "there is no 'layer'; known are title,"),
        (OWN.replace("layers = 4\n", "layers = 4.5\n", 1), "layers is 4.5; it wants int."),
        (OWN.replace("layers = 4\n", "layers = -4\n", 1), "layers is -4; it must be from 1 to 1,000,000."),
        (OWN.replace("heads = 4\n", "heads = 5\n", 1), "5 heads do not divide a width of 256"),
        (OWN.replace("active = 2", "active = 9"), "a token takes 9 of 8 experts; mend it."),
        (OWN.replace("[experts]", "[[experts]]"), "[experts] is [{"),
        (OWN.replace("shared = 128\n", ""), "shared is missing; add it."),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_the_remedy(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        find_shape(str(path))
    assert says in str(error.value)
    assert str(error.value).startswith(f"--model {path}: ")
