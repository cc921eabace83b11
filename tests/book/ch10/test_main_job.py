"""The main job, scripts/10_dp_tp.py, as its readers run it: the page, the files, the verdict, and wrong arguments."""

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from PIL import Image

from distmuon import launch
from distmuon.models import recipe
from distmuon.optim import strategies
from distmuon.sharding import layout
from distmuon.verify import bounds, training
from muonbook import jobs
from muonbook.ch10 import figures, main_job

JOB = str(worlds.ROOT / "scripts" / "10_dp_tp.py")
DEMO = (worlds.ROOT / "book" / "demo.md").read_text(encoding="utf-8")
VERIFIED = "Verified: the sharded run is the single-process run.\n"
KNOWN = "blockwise, gather_all, gather_cut, owner, periodic"
SECONDS = ("seconds_per_step", "reference_seconds_per_step", "start_seconds")
DIFFERENCE = re.compile(r"\de-\d\d")  # the last digits depend on the processor, and the README says so


# ---- A healthy run ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[worlds.Ending, Path]:
    """What `make demo` runs, and the folder of its files."""
    folder = tmp_path_factory.mktemp("demo") / "new"
    files = ["--json", f"{folder}/run.json", "--figure", f"{folder}/run.png"]
    return worlds.perform(JOB, "--dp", "4", "--tp", "2", *files), folder


def test_the_demo_prints_the_page_that_is_explained(demo: tuple[worlds.Ending, Path]) -> None:
    ending, folder = demo
    assert (ending.code, ending.err) == (0, "")  # and with that no progress bar and no warning
    assert ending.out.endswith(f"Picture: {folder / 'run.png'}\n{VERIFIED}")
    assert "FAIL" not in ending.out
    (shown,) = re.findall(r"^```\n(Grid:.*?)^```$", DEMO, re.DOTALL | re.MULTILINE)
    page = [DIFFERENCE.sub("?", line.rstrip()) for line in ending.out.splitlines()]
    for line in filter(None, shown.splitlines()):
        assert DIFFERENCE.sub("?", line.rstrip()) in page
    rows = re.findall(r"^  (\w+) +(dp|tp|world) ", shown, re.MULTILINE)
    assert re.findall(r"^\| `(\w+)` (dp|tp|world) \|", DEMO, re.MULTILINE) == rows  # each is explained, in order
    with Image.open(folder / "run.png") as image:
        assert "4 DP × 2 TP" in image.info["Description"]


def test_the_json_file_holds_all_that_was_promised(demo: tuple[worlds.Ending, Path]) -> None:
    result = json.loads((demo[1] / "run.json").read_text())
    expected: dict[str, Any] = {
        "grid": {"dp": 4, "tp": 2}, "backend": "gloo", "device": "cpu", "dtype": "float32", "optimizer": "muon",
        "strategy": "gather_all", "publish": "parameters", "steps": 30, "seed": 0,
        "exact": True, "replicas_agree": True, "passed": True,
        "ledger_differences": [],
    }  # fmt: skip
    assert {key: result[key] for key in expected} == expected
    assert result["losses"] == pytest.approx(result["reference_losses"], rel=0.02)
    assert 0.3 < result["accuracy"] <= 1
    assert 0 <= result["float64_relative_difference"] <= 1e-10
    assert 0 < result["relative_difference"] <= 4 * result["control_relative_difference"] < 1
    assert 0 < result["unrounded_relative_difference"] <= 4 * result["unrounded_control_relative_difference"] < 1e-4
    assert result["verdicts"] == dict.fromkeys(("exact", "float64", "unrounded", "float32", "replicas"), True)
    assert all(0 < result[key] < 600 for key in SECONDS)
    assert result["machine"]["torch"] == torch.__version__
    assert {row["rank"] for row in result["ledger"]} == set(range(8))
    for row in result["ledger"]:
        assert row["sent_bytes"] == row["predicted_sent_bytes"] > 0
        assert row["payload_bytes"] >= row["calls"] > 0


def test_torchrun_in_another_folder_prints_the_same_page_without_a_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--dp", "1", "--tp", "2", "--steps", "4", "--json"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ending = worlds.finish(*torchrun, JOB, *small, "run.json", OMP_NUM_THREADS="1")
    assert ending.code == 0, ending.err
    here = worlds.perform(JOB, *small, "new/here.json")
    theirs, ours = ([line for line in out.splitlines() if "Time:" not in line] for out in (ending.out, here.out))
    assert theirs == ours
    assert "Time: not compared under torchrun" in ending.out  # its ranks leave while the reference trains
    assert re.search(r"^Time: a step takes [\d.]+ x as long", here.out, re.MULTILINE)
    stored, anew = (json.loads((tmp_path / name).read_text()) for name in ("run.json", "new/here.json"))
    assert stored["reference_seconds_per_step"] is None
    assert {**stored, **dict.fromkeys(SECONDS)} == {**anew, **dict.fromkeys(SECONDS)}


# ---- One rank: what a run says that fails -----------------------------------------------------------------


def alone(*arguments: str) -> worlds.Ending:
    """Run the job on one rank, in this process."""
    return worlds.perform(JOB, "--dp", "1", "--tp", "1", "--steps", "2", *arguments)


def test_one_rank_in_float64_is_its_own_reference() -> None:
    ending = alone("--dtype", "float64")
    assert ending.code == 0
    assert "Grid: 1 DP x 1 TP = 1 rank, gloo on cpu, float64, muon." in ending.out
    assert "\n  none: one process has nobody to send to\n\nTime:" in ending.out
    assert not re.search("^  float32|control", ending.out, re.MULTILINE)
    assert ending.out.endswith(VERIFIED)


def test_a_byte_too_many_is_said_and_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more(*given: Any) -> Any:
        ledger = training_predicts(*given)
        ledger.record("all_gather", "dp", 2, 10, "something else")
        return ledger

    training_predicts = training.predict_run
    monkeypatch.setattr(training, "predict_run", one_more)
    ending = alone("--dtype", "float64")
    assert ending.code == 1
    assert "  FAIL rank 0: all_gather over dp (something else)" in ending.out
    assert "counted = predicted" not in ending.out
    assert "luck" not in ending.out  # nothing is rounded to bf16 here
    assert ending.out.splitlines()[-1] == "NOT verified: see FAIL above."
    quiet = alone("--dtype", "float64", "--quiet")
    assert quiet == (1, "NOT verified: run again without --quiet to see why.\n", "")


def test_quiet_prints_the_verdict_alone() -> None:
    assert alone("--dtype", "float64", "--quiet") == (0, VERIFIED, "")


def test_a_picture_that_cannot_be_drawn_is_said_and_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise launch.OutputError("--figure: the disk is full.")

    monkeypatch.setattr(figures, "save_run", full)
    files = ["--json", str(tmp_path / "run.json"), "--figure", str(tmp_path / "run.png")]
    ending = alone("--dtype", "float64", "--quiet", *files)
    assert ending == (1, VERIFIED, "error: --figure: the disk is full.\n")
    assert json.loads((tmp_path / "run.json").read_text())["passed"]


def test_a_control_that_may_have_been_lucky_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "CONTROL_FACTOR", -1.0)
    ending = alone()
    assert ending.code == 1
    assert re.search("^  float32 .*FAIL$", ending.out, re.MULTILINE)
    assert "luck decides" in ending.out


OF_ANOTHER = {"verdicts": {"exact": True, "muon": False}, "strategy": "periodic", "grid": {"tp": 2}}


@pytest.mark.parametrize(
    ("changes", "quiet", "says"),
    [
        ({"passed": True}, True, [VERIFIED.strip()]),
        ({"verdicts": {"exact": False}}, True, ["NOT verified: run again without --quiet to see why."]),
        ({"ledger_differences": ["rank 0: ..."]}, False, ["NOT verified: see FAIL above."]),
        (OF_ANOTHER | {"ledger_differences": ["rank 0: ..."]}, False, ["NOT verified: see FAIL above."]),
        (
            OF_ANOTHER,
            False,
            [
                "Verified as what it is: periodic over 2 TP ranks, and the sharded run is its single-process run.",
                "NOT verified as Muon: that is another optimizer, whose run ends 3e-01 of the movement away.",
            ],
        ),
    ],
)
def test_the_verdict_says_what_was_found(changes: dict[str, Any], quiet: bool, says: list[str]) -> None:
    usual = {"passed": False, "verdicts": {"exact": True}, "ledger_differences": [], "muon_relative_difference": 0.3}
    assert main_job.verdict_lines(usual | changes, quiet) == says


@pytest.mark.parametrize(
    ("terminal", "rank", "notebook", "drawn"),
    [(True, 0, False, True), (False, 0, False, False), (True, 1, False, False), (True, 0, True, False)],
)
def test_only_rank_0_draws_a_progress_bar_and_only_on_a_terminal(
    monkeypatch, terminal: bool, rank: int, notebook: bool, drawn: bool
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    if notebook:
        monkeypatch.setenv("JPY_PARENT_PID", "1")
    with jobs.progress(3, rank) as tick:
        tick()
    assert bool(screen.getvalue()) == drawn


@pytest.mark.parametrize(
    ("dp", "tp", "says"),
    [
        (4, 2, "2 parameters of 10 elements on each of 2 TP ranks, laid out in 1 buffer and 1 bucket of 12; each "
               "bucket is cut into 4 shards, with 2 elements of padding in all (20.0%). "
               "Straddling a shard boundary: 1 parameter."),
        (1, 1, "2 parameters of 10 elements, laid out in 1 buffer and 1 bucket of 10; each bucket is one shard, "
               "with 0 elements of padding in all. Straddling a shard boundary: no parameter."),
    ],
)  # fmt: skip
def test_the_map_in_words_says_how_many_in_english(dp: int, tp: int, says: str) -> None:
    specs = [layout.ParamSpec("w", (9,), "float32"), layout.ParamSpec("b", (1,), "float32")]
    assert main_job.map_in_words(layout.plan(specs, dp), tp) == says


# ---- Wrong arguments: one sentence, exit code 2, nothing started ------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("--strategy gossip", f"--strategy gossip: choose one of {KNOWN}, or the path of a .py file with your own."),
        ("--whole-every 3", "--whole-every does nothing with --strategy gather_all; take periodic, or leave it out."),
        (
            "--optimizer adamw --whole-every 3",
            "--whole-every does nothing with --optimizer adamw; leave one of the two",
        ),
        ("--tp 3", "--tp 3 does not divide the layers' 256 features; choose one of 1, 2, 4, 8, 16, 32, 64, 128, 256."),
        ("--dp 2000", "--dp 2000: there are 1500 digits to share out; choose at most as many ranks."),
        ("--lr -1", "--lr -1: must be a positive number."),
        ("--backend nccl --dp 8 --tp 32", "--backend nccl "),  # nowhere are there 256 GPUs
        ("--figure run.bmp", "--figure run.bmp: figures are saved as .png or .svg; choose such a name."),
        ("--json {folder}", "--json {folder}: that is a folder; name a file in it."),
        ("--figure {folder}.png/run.png --json {file}", "--figure {folder}.png/run.png: cannot be written (Not a dir"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_nothing_starts(tmp_path: Path, wrong: str, says: str) -> None:
    places = {"folder": str(tmp_path / "folder"), "file": str(tmp_path / "file")}
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.png").touch()
    (tmp_path / "file").write_text("kept")
    before = sorted(tmp_path.rglob("*"))
    ending = worlds.answer(JOB, *wrong.format(**places).split())
    assert (ending.code, ending.out) == (2, "")
    assert ending.err.startswith(f"error: {says.format(**places)}")
    assert ending.err.endswith(".\n")
    assert ending.err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "kept"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("wanted", [(512, 8), (1500, 8), (5000, 8), (10, 300), (512, 2000)])
@pytest.mark.parametrize("dp", [1, 3, 48, 1500])
def test_the_combination_that_an_error_suggests_works(dp: int, wanted: tuple[int, int]) -> None:
    tried = recipe.Recipe(batch=wanted[0], micro_batches=wanted[1])
    if tried.batch <= 1500 and tried.batch % tried.micro_batches == tried.micro_batches % dp == 0:
        assert tried.check(dp, 1) is tried
        return
    with pytest.raises(launch.UsageError) as error:
        tried.check(dp, 1)
    found = re.search(r"choose for instance --batch (\d+) --micro-batches (\d+)\.$", str(error.value))
    assert found, error.value
    recipe.Recipe(batch=int(found[1]), micro_batches=int(found[2])).check(dp, 1)


def test_the_t_that_an_error_names_are_those_that_work() -> None:
    odd = recipe.Recipe(widths=(64, 96, 32, 36, 32, 10))  # two split layers, of 96 and 36 features
    with pytest.raises(launch.UsageError, match=r"choose one of 1, 2, 3, 4, 6, 12\.$"):
        odd.check(1, 8)
    for tp in (1, 2, 3, 4, 6, 12):
        assert odd.check(1, tp) is odd
        training.plan_run(odd, 1, tp)  # builds the layers, which refuse a T that does not divide


# ---- A strategy of the reader's own -----------------------------------------------------------------------

BACKWARDS = """
from distmuon.optim.strategies.gather_all import GatherAll


class Backwards(GatherAll):
    def bucket_groups(self):
        return [(bucket,) for bucket in reversed(self.context.layout.buckets)]


STRATEGY = Backwards
"""
BLOCK_WISE = """
from distmuon.optim.strategies.gather_all import COSTS, GatherAll


class BlockWise(GatherAll):
    def tp_gather(self, buckets, blocks):
        return {index: block.clone() for index, block in blocks.items()}

    def tp_shard(self, buckets, updates):
        return updates


STRATEGY = BlockWise
"""


def run_own(folder: Path, text: str, *grid: str) -> worlds.Ending:
    (folder / "my_strategy.py").write_text(text)
    training = ["--steps", "3", "--dtype", "float64", "--strategy", str(folder / "my_strategy.py")]
    return worlds.perform(JOB, *grid, *training, "--figure", str(folder / "run.png"))


def test_a_right_strategy_of_the_readers_own_is_verified_and_its_bytes_are_counted_only(tmp_path: Path) -> None:
    ending = run_own(tmp_path, BACKWARDS, "--dp", "2", "--tp", "1")
    assert ending.code == 0, ending
    assert "has no COSTS, so these are counted only\n" in ending.out
    assert re.search(r"^  all +\d+\.\d +- +[\d,]+$", ending.out, re.MULTILINE)
    assert VERIFIED in ending.out


def test_a_wrong_strategy_is_told_how_wrong_it_is_and_its_bytes_where_they_are(tmp_path: Path) -> None:
    ending = run_own(tmp_path, BLOCK_WISE, "--dp", "1", "--tp", "2")
    assert ending.code == 1
    assert re.search(r"^  FAIL rank 0: all_gather over tp \(momentum, layers", ending.out, re.MULTILINE)
    assert re.search(r"^  exact .* not equal +FAIL$", ending.out, re.MULTILINE)
    assert re.search(r"^  float64 .* [1-9]e-01, at most 1e-10 +FAIL$", ending.out, re.MULTILINE)
    assert "NOT verified" in ending.out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            None,
            f"that file cannot be read (No such file or directory); write it first, or choose one of {KNOWN}.",
        ),
        ("class Mine:\n", "Python cannot read that file ("),
        ("class Mine: pass\n", "that file names no strategy; end it with a line `STRATEGY = TheClass`."),
    ],
)
def test_a_strategy_file_that_cannot_be_one_is_refused_at_once(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "my_strategy.py"
    if text is not None:
        file.write_text(text)
    ending = worlds.answer(JOB, "--strategy", str(file))
    assert ending.code == 2
    assert ending.err.startswith(f"error: --strategy {file}: {says}")
    assert ending.err.count("\n") == 1


@pytest.mark.parametrize("own", ["owner.OneOwner", "gather_all.GatherAll", "gather_cut.GatherCut"])
def test_a_recipe_asks_a_strategy_of_the_readers_own_what_goes_with_it(tmp_path: Path, own: str) -> None:
    mine, name = tmp_path / "mine.py", own.partition(".")[0]
    mine.write_text(f"from distmuon.optim.strategies import {name}\n\n\nclass Mine({own}): ...\n\n\nSTRATEGY = Mine\n")
    for asked in (recipe.Recipe(overlap="naive"), recipe.Recipe(publish="updates")):
        answers = []
        for strategy in (name, str(mine)):
            try:
                replace(asked, strategy=strategy).check(2, 1)
                answers.append("")
            except launch.UsageError as error:
                answers.append(
                    str(error).replace(f"--strategy {strategy} ", "--strategy X ").replace(f"{strategy},", "X,")
                )
        assert answers[0] == answers[1]


def test_a_strategy_without_all_moves_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n    def dp_gather(self): ...\n\nSTRATEGY = Mine\n")
    lacking = "plan, options, bucket_groups, waves, tp_gather, newton_schulz, tp_shard, dp_shard, lr_ratio"
    with pytest.raises(ValueError, match=f"its class lacks {lacking}: write them"):
        strategies.load(str(tmp_path / "mine.py"))
