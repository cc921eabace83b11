"""The main job, scripts/10_dp_tp.py, as its readers run it: the page, the files, the verdict, and wrong arguments."""

import importlib.util
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import worlds
from PIL import Image

from distmuon import launch
from distmuon.launch import session
from distmuon.models import recipe
from distmuon.sharding import layout
from distmuon.verify import bounds, certificate, training
from muonbook import jobs
from muonbook.ch10 import main_job

JOB = str(worlds.ROOT / "scripts" / "10_dp_tp.py")
DEMO = (worlds.ROOT / "book" / "demo.md").read_text(encoding="utf-8")
VERIFIED = "Verified: the sharded run is the single-process run.\n"
KNOWN = "blockwise, gather_all, gather_cut, owner, periodic"
SECONDS = ("seconds_per_step", "reference_seconds_per_step", "start_seconds")
DIFFERENCE = re.compile(r"\de-\d\d")  # the last digits depend on the processor, and the README says so


def without_times(page: str) -> list[str]:
    return [line for line in page.splitlines() if not line.startswith(("Time:", "Picture:"))]


# ---- A healthy run ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[worlds.Ending, Path]:
    """What `make demo` runs, and the folder of its files."""
    folder = tmp_path_factory.mktemp("first")
    files = ["--json", f"{folder}/new/run.json", "--figure", f"{folder}/new/run.png"]
    return worlds.perform(JOB, "--dp", "4", "--tp", "2", *files), folder / "new"


def test_the_page_tells_everything_and_ends_with_the_verdict(first: tuple[worlds.Ending, Path]) -> None:
    ending, _ = first
    assert (ending.code, ending.err) == (0, "")  # and with that no progress bar and no warning
    page = " ".join(ending.out.split())
    for words in (
        "Grid: 4 DP x 2 TP = 8 ranks, gloo on cpu, float32, muon.",
        "Virtual map: 8 parameters of 42,634 elements",
        "shard boundary",
        "Training: 30 steps of 512 handwritten digits.",
        "exact 3 steps on the same gradients bitwise equal pass",
        "every rank, bucket and collective: counted = predicted",
    ):
        assert words in page
    control = r"at most \S+, 4 x control"
    bounds = {"float64": "at most 1e-10", "unrounded": control, "float32": control, "replicas": "equal"}
    for name, allowed in bounds.items():
        assert re.search(rf"^  {name} .*{allowed}.* pass$", ending.out, re.MULTILINE), name
    rows = re.findall(r"^  (\w+) +(\w+) +[\d.]+ +([\d,]+) +([\d,]+)$", ending.out, re.MULTILINE)
    assert {(op, group) for op, group, _, _ in rows} == {
        ("reduce_scatter", "dp"), ("all_gather", "dp"), ("all_gather", "tp"), ("all_reduce", "tp"),
        ("all_reduce", "dp"), ("all_reduce", "world"),
    }  # fmt: skip
    assert all(predicted == counted for _, _, predicted, counted in rows)
    assert "FAIL" not in ending.out
    assert ending.out.endswith(VERIFIED)


def test_the_json_file_holds_all_that_was_promised(first: tuple[worlds.Ending, Path]) -> None:
    result = json.loads((first[1] / "run.json").read_text())
    expected: dict[str, Any] = {
        "grid": {"dp": 4, "tp": 2}, "backend": "gloo", "device": "cpu", "dtype": "float32", "optimizer": "muon",
        "strategy": "gather_all", "publish": "parameters", "steps": 30, "seed": 0,
        "exact": True, "replicas_agree": True, "passed": True,
        "ledger_differences": [],
    }  # fmt: skip
    assert {key: result[key] for key in expected} == expected
    assert len(result["losses"]) == len(result["reference_losses"]) == 30
    assert result["losses"] == pytest.approx(result["reference_losses"], rel=0.02)
    assert result["losses"][-1] < result["losses"][0]
    assert 0.3 < result["accuracy"] <= 1
    assert 0 <= result["float64_relative_difference"] <= 1e-10
    assert 0 < result["relative_difference"] <= 4 * result["control_relative_difference"] < 1
    assert 0 < result["unrounded_relative_difference"] <= 4 * result["unrounded_control_relative_difference"] < 1e-4
    assert result["verdicts"] == dict.fromkeys(("exact", "float64", "unrounded", "float32", "replicas"), True)
    assert all(0 < result[key] < 600 for key in SECONDS)
    assert result["machine"]["torch"] == torch.__version__
    assert {row["rank"] for row in result["ledger"]} == set(range(8))
    for row in result["ledger"]:
        assert row.keys() == {"rank", "op", "group", "calls", "payload_bytes", "sent_bytes", "predicted_sent_bytes"}
        assert row["sent_bytes"] == row["predicted_sent_bytes"] > 0
        assert row["payload_bytes"] >= row["calls"] > 0


def test_the_picture_is_drawn_and_described(first: tuple[worlds.Ending, Path]) -> None:
    ending, folder = first
    assert f"Picture: {folder / 'run.png'}\n" in ending.out
    with Image.open(folder / "run.png") as image:
        assert min(image.size) > 500
        assert "4 DP × 2 TP" in image.info["Description"]


def test_the_page_that_is_explained_is_what_the_demo_prints(first: tuple[worlds.Ending, Path]) -> None:
    (shown,) = re.findall(r"^```\n(Grid:.*?)^```$", DEMO, re.DOTALL | re.MULTILINE)
    page = [DIFFERENCE.sub("?", line.rstrip()) for line in first[0].out.splitlines()]
    for line in filter(None, shown.splitlines()):
        assert DIFFERENCE.sub("?", line.rstrip()) in page
    rows = re.findall(r"^  (\w+) +(dp|tp|world) ", shown, re.MULTILINE)
    assert re.findall(r"^\| `(\w+)` (dp|tp|world) \|", DEMO, re.MULTILINE) == rows  # each is explained, in order


def test_torchrun_in_another_folder_prints_the_same_page_without_a_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--dp", "1", "--tp", "2", "--steps", "4", "--json"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ending = worlds.finish(*torchrun, JOB, *small, "run.json", OMP_NUM_THREADS="1")
    assert ending.code == 0, ending.err
    here = worlds.perform(JOB, *small, "new/here.json")
    assert without_times(ending.out) == without_times(here.out)
    assert "Time: not compared under torchrun" in ending.out  # its ranks leave while the reference trains
    assert re.search(r"^Time: a step takes [\d.]+ x as long", here.out, re.MULTILINE)
    theirs, ours = (json.loads((tmp_path / name).read_text()) for name in ("run.json", "new/here.json"))
    assert theirs["reference_seconds_per_step"] is None
    assert {**theirs, **dict.fromkeys(SECONDS)} == {**ours, **dict.fromkeys(SECONDS)}


def test_quiet_says_the_verdict_alone_for_adamw_and_bf16_as_well(tmp_path: Path) -> None:
    picture = tmp_path / "of" / "run.svg"
    training = ["--steps", "3", "--lr", "0.1", "--optimizer", "adamw", "--dtype", "bfloat16"]
    options = ["--quiet", "--dp", "2", "--tp", "1", *training]
    ending = worlds.perform(JOB, *options, "--figure", str(picture), "--json", f"{tmp_path}/run.json")
    assert ending == (0, f"Picture: {picture}\n{VERIFIED}", "")
    assert "adamw, bfloat16" in picture.read_text()
    result = json.loads((tmp_path / "run.json").read_text())
    assert (result["optimizer"], result["dtype"], result["passed"]) == ("adamw", "bfloat16", True)
    assert result["verdicts"]["bfloat16"] is None  # its control moves so far that its bound would be none
    assert result["control_relative_difference"] > 0.3 / 4
    assert not [row for row in result["ledger"] if row["group"] == "tp"]


# ---- In this process: the progress bar, one rank, and a run that fails -------------------------------------


@pytest.fixture
def job(monkeypatch) -> Iterator[ModuleType]:
    """The worker as a module, to be run on one rank in this process."""
    spec = importlib.util.spec_from_file_location("main_job_worker", JOB)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [JOB, "--dp", "1", "--tp", "1", "--steps", "2", "--dtype", "float64"])
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_picture_for_which_the_disk_is_full_takes_nothing_else_with_it(
    job: ModuleType, monkeypatch, capsys, tmp_path: Path
) -> None:
    session.directory()  # this process's own, which outlives the test: not below a path too long for a fork server
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "full.png").symlink_to("/dev/full")
    files = ["--figure", str(tmp_path / "full.png"), "--json", str(tmp_path / "run.json")]
    monkeypatch.setattr(sys, "argv", [*sys.argv, *files])
    assert job.main() == 1
    said = capsys.readouterr()
    kept = re.fullmatch(r"error: --figure .*\(No space left on device\); what it was to hold is in (\S+)\.\n", said.err)
    assert kept
    assert Path(kept[1]).read_bytes().startswith(b"\x89PNG")
    assert said.out.endswith(VERIFIED)
    assert "Picture" not in said.out
    assert json.loads((tmp_path / "run.json").read_text())["passed"]


def test_one_rank_in_float64_is_its_own_reference(job: ModuleType, capsys) -> None:
    assert job.main() == 0
    out = capsys.readouterr().out
    assert "Grid: 1 DP x 1 TP = 1 rank, gloo on cpu, float64, muon." in out
    assert "1 TP rank" not in out
    assert "\n  none: one process has nobody to send to\n\nTime:" in out
    assert not re.search("^  float32|control", out, re.MULTILINE)
    assert out.endswith(VERIFIED)


def test_a_failed_certificate_is_said_and_exits_with_1(job: ModuleType, capsys, monkeypatch) -> None:
    monkeypatch.setattr(certificate, "identical", lambda *given: False)
    assert job.main() == 1
    out = capsys.readouterr().out
    assert re.search("^  exact .*not equal .*FAIL$", out, re.MULTILINE)
    assert "Verified" not in out
    assert out.splitlines()[-1] == "NOT verified: see FAIL above."
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--quiet"])
    assert job.main() == 1
    assert capsys.readouterr().out == "NOT verified: run again without --quiet to see why.\n"


@pytest.mark.parametrize(("steps", "lucky"), [("2", True), ("12", False)])
def test_a_control_that_may_have_been_lucky_is_said(job, capsys, monkeypatch, steps: str, lucky: bool) -> None:
    monkeypatch.setattr(sys, "argv", [JOB, "--dp", "1", "--tp", "1", "--steps", steps])
    monkeypatch.setattr(bounds, "CONTROL_FACTOR", -1.0)
    assert job.main() == 1
    out = capsys.readouterr().out
    assert re.search("^  float32 .*FAIL$", out, re.MULTILINE)
    assert ("luck decides" in out) == lucky


def test_a_byte_that_was_not_predicted_is_said_and_exits_with_1(job: ModuleType, capsys, monkeypatch) -> None:
    def one_more(*given: Any) -> Any:
        ledger = training_predicts(*given)
        ledger.record("all_gather", "dp", 2, 10, "something else")
        return ledger

    training_predicts = training.predict_run
    monkeypatch.setattr(training, "predict_run", one_more)
    assert job.main() == 1
    out = capsys.readouterr().out
    assert "  FAIL rank 0: all_gather over dp (something else)" in out
    assert "counted = predicted" not in out


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
        for _ in range(3):
            tick()
    assert bool(screen.getvalue()) == drawn


# ---- Wrong arguments: one sentence, exit code 2, nothing started ------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("--optimizer sgd", "--optimizer sgd is unknown; choose one of muon, adamw."),
        ("--dtype float16", "--dtype float16 is unknown; choose one of float32, bfloat16, float64."),
        (
            "--strategy gossip",
            f"--strategy gossip: choose one of {KNOWN}, or the path of a .py file with your own.",
        ),
        ("--whole-every 3", "--whole-every does nothing with --strategy gather_all; take periodic, or leave it out."),
        (
            "--optimizer adamw --whole-every 3",
            "--whole-every does nothing with --optimizer adamw; leave one of the two",
        ),
        ("--strategy periodic --whole-every 0", "--whole-every 0: must be at least 1."),
        ("--tp 3", "--tp 3 does not divide the layers' 256 features; choose one of 1, 2, 4, 8, 16, 32, 64, 128, 256."),
        (
            "--dp 3",
            "--micro-batches 8 cannot be shared out by --dp 3 ranks; choose for instance --batch 513 --micro-ba",
        ),
        ("--dp 2000", "--dp 2000: there are 1500 digits to share out; choose at most as many ranks."),
        ("--dp 0", "--dp 0 --tp 2: both must be at least 1."),
        (
            "--batch 10",
            "--batch 10 cannot be cut into 8 equal pieces; choose for instance --batch 8 --micro-batches 8.",
        ),
        (
            "--batch 2048",
            "--batch 2048 is more than the 1500 digits there are; choose for instance --batch 1496 --micro-",
        ),
        ("--batch 0", "--batch 0: must be at least 1."),
        ("--steps 0", "--steps 0: must be at least 1."),
        ("--micro-batches 0", "--micro-batches 0: must be at least 1."),
        ("--lr -1", "--lr -1: must be a positive number."),
        ("--seed -1", "--seed -1: must be from 0 to 2**63 - 1."),
        ("--figure run.bmp", "--figure run.bmp: figures are saved as .png or .svg; choose such a name."),
        ("--figure=", "--figure : figures are saved as .png or .svg; choose such a name."),
        ("--json {file}/run.json", "--json {file}/run.json: cannot be written (Not a directory); name a file in a fol"),
        ("--json {folder}", "--json {folder}: that is a folder; name a file in it."),
        ("--json=", "--json : that is a folder; name a file in it."),
        ("--figure {folder}.png/run.png --json {file}", "--figure {folder}.png/run.png: cannot be written (Not a dir"),
        ("--steps many", "argument --steps: invalid int value: 'many'; see --help."),
        ("--json", "argument --json: expected one argument; see --help."),
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


@pytest.mark.parametrize("wanted", [(512, 8), (1500, 8), (5000, 8), (1, 1), (10, 300), (512, 2000)])
@pytest.mark.parametrize("dp", [1, 2, 3, 5, 7, 12, 48, 700, 1500])
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


def test_help_explains_every_argument_and_shows_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    ending = worlds.answer(JOB, "--help")
    assert (ending.code, ending.err) == (0, "")
    for option in ("dp", "tp", "backend", "device", "timeout", "threads", *recipe.Recipe.__dataclass_fields__):
        if option not in ("widths", "weight_decay", "bucket_size", "wire"):
            assert re.search(rf"^  --{option.replace('_', '-')} \S+\s+\w.*\(default: ", ending.out, re.MULTILINE), (
                option
            )
    for shown in (
        "{muon,adamw}",
        "{float32,bfloat16,float64}",
        "{gloo,nccl,auto}",
        "{blockwise,gather_all",
        "{cpu,cuda}",
    ):
        assert shown in ending.out
    assert ending.out.count("\n  python scripts/10_dp_tp.py ") == 6
    assert "\n  torchrun --nproc-per-node 8 scripts/10_dp_tp.py " in ending.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_without_a_gpu_is_one_sentence() -> None:
    ending = worlds.answer(JOB, "--backend", "nccl")
    assert (ending.code, ending.out) == (2, "")
    assert ending.err == ("error: --backend nccl on GPUs needs CUDA, and torch sees no GPU here; use --backend gloo.\n")


@pytest.mark.parametrize(
    ("dp", "tp", "says"),
    [
        (4, 2, "2 parameters of 10 elements on each of 2 TP ranks, laid out in 1 buffer and 1 bucket of 12; each "
               "bucket is cut into 4 shards, with 2 elements of padding in all. "
               "Straddling a shard boundary: 1 parameter."),
        (1, 1, "2 parameters of 10 elements, laid out in 1 buffer and 1 bucket of 10; each bucket is one shard, "
               "with 0 elements of padding in all. Straddling a shard boundary: no parameter."),
    ],
)  # fmt: skip
def test_the_map_in_words_says_how_many_in_english(dp: int, tp: int, says: str) -> None:
    specs = [layout.ParamSpec("w", (9,), "float32"), layout.ParamSpec("b", (1,), "float32")]
    assert main_job.map_in_words(layout.plan(specs, dp), tp) == says


# ---- Strategies that are other optimizers -----------------------------------------------------------------


def test_another_optimizer_is_verified_as_what_it_is_and_not_as_muon(tmp_path: Path) -> None:
    """So is blockwise, on chapter 16's page."""
    strategy = ["--strategy", "periodic", "--whole-every", "2"]
    ending = worlds.perform(JOB, "--dp", "1", "--tp", "2", "--steps", "4", *strategy, "--json", f"{tmp_path}/run.json")
    assert ending.code == 1
    for row in ("exact", "float64", "unrounded", "replicas"):
        assert re.search(rf"^  {row} .* pass$", ending.out, re.MULTILINE), row
    assert re.search(
        r"^  muon +4 steps, difference / movement +[1-9]e-01, at most 1e-10 +FAIL$", ending.out, re.MULTILINE
    )
    assert "every rank, bucket and collective: counted = predicted" in ending.out
    verified, not_muon = ending.out.splitlines()[-2:]
    assert (
        verified == "Verified as what it is: periodic over 2 TP ranks, and the sharded run is its single-process run."
    )
    assert re.fullmatch(
        r"NOT verified as Muon: that is another optimizer, whose run ends [1-9]e-01 of the movement away\.", not_muon
    )
    result = json.loads((tmp_path / "run.json").read_text())
    assert 0.01 < result["muon_relative_difference"] < 1
    assert result["whole_every"] == 2
    assert [row for row, passed in result["verdicts"].items() if not passed] == ["muon"]


# ---- A strategy of the reader's own -----------------------------------------------------------------------

BACKWARDS = """
from distmuon.optim.strategies.gather_all import GatherAll


class Backwards(GatherAll):
    def bucket_groups(self):
        return [(bucket,) for bucket in reversed(self.context.layout.buckets)]


STRATEGY = Backwards
"""
BLOCK_WISE = """
from distmuon.optim.strategies.gather_all import GatherAll


class BlockWise(GatherAll):
    def tp_gather(self, buckets, blocks):
        return {index: block.clone() for index, block in blocks.items()}

    def tp_shard(self, buckets, updates):
        return updates


STRATEGY = BlockWise
"""
PREDICTED = """
from distmuon.optim.strategies.gather_all import COSTS

"""
OWN = ["--dp", "2", "--tp", "2", "--steps", "3", "--dtype", "float64"]


def run_own(folder: Path, text: str) -> worlds.Ending:
    (folder / "my_strategy.py").write_text(text)
    return worlds.perform(JOB, *OWN, "--strategy", str(folder / "my_strategy.py"), "--figure", str(folder / "run.png"))


def test_a_right_strategy_of_the_readers_own_is_verified_and_its_bytes_are_counted_only(tmp_path: Path) -> None:
    ending = run_own(tmp_path, BACKWARDS)
    assert ending.code == 0, ending
    assert "has no COSTS, so these are counted only\n" in ending.out
    assert re.search(r"^  all +\d+\.\d +- +[\d,]+$", ending.out, re.MULTILINE)
    assert VERIFIED in ending.out


def test_a_strategy_of_ones_own_may_predict_its_bytes(tmp_path: Path) -> None:
    ending = run_own(tmp_path, BACKWARDS + PREDICTED)
    assert ending.code == 0, ending
    assert "every rank, bucket and collective: counted = predicted" in ending.out


def test_a_wrong_strategy_is_told_how_wrong_it_is_and_its_bytes_where_they_are(tmp_path: Path) -> None:
    ending = run_own(tmp_path, BLOCK_WISE + PREDICTED)
    assert ending.code == 1
    assert re.search(r"^  FAIL rank 0: all_gather over tp \(momentum, layers", ending.out, re.MULTILINE)
    assert re.search(r"^  exact .* not equal +FAIL$", ending.out, re.MULTILINE)
    assert re.search(r"^  float64 .* [1-9]e-01, at most 1e-10 +FAIL$", ending.out, re.MULTILINE)
    assert "luck" not in ending.out  # nothing is rounded to bf16 here
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


def test_a_strategy_without_all_moves_is_refused_by_name(tmp_path: Path) -> None:
    ending = run_own(tmp_path, "class Mine:\n    def dp_gather(self): ...\n\nSTRATEGY = Mine\n")
    assert ending.code == 1
    lacking = "plan, options, bucket_groups, waves, tp_gather, newton_schulz, tp_shard, dp_shard, lr_ratio"
    assert f"its class lacks {lacking}: write them" in ending.err
