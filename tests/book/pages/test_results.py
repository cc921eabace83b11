"""Results files: numbers reach pages unchanged, what is missing is named, and verdicts agree with the numbers."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import measured
import pytest
import torch

from distmuon import launch
from distmuon.optim.coefficients import quintics
from distmuon.optim.fast_paths import half_gram_pays
from muonbook.measure import results
from tools import bench, measure

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "book" / "results"
STORED = {"ratio": {"dp4": 1.24999, "dp2": None}, "share": 0.3333, "bytes": 1234567, "name": "veth", "ok": True}
STORED["list"] = [{"median": 0.5}, -2]
STORED["share of"] = {"1,024 tokens": 0.5, "16,384 tokens": 0.25}
STORED["rows"] = [{"dp": 4, "as": "bf16, momentum bf16", "peak": 7}, {"dp": 4, "as": "fp32, momentum bf16", "peak": 8}]

# ---- The role ---------------------------------------------------------------------------------------------


def fill_in(asked: str) -> str:
    path, form = re.fullmatch(r"(\S+(?: [+/] \S+)*)(?: (\S+))?", asked).groups("")  # type: ignore[union-attr]
    return measured.show(measured.value_of(STORED, path), form)


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ("ratio.dp4 .3f", "1.250"),
        ("share .1%", "33.3%"),
        ("bytes ,", "1,234,567"),
        ("bytes", "1234567"),
        ("name", "veth"),
        ("ok", "yes"),
        ("list.0.median .2f", "0.50"),
        ("list.1 .1f", "−2.0"),
        ("rows.dp=4,as=fp32*.peak", "8"),
        ("rows.1.dp+peak", "12"),
        ("share?of*.16* .0%", "25%"),
        ("ratio.dp2 .3f", "not measured"),
        ("ratio.dp4 / share .1f", "3.8"),
        ("ratio.dp2 / share .1f", "not measured"),
        ("ratio.dp4 + rows.0.peak / list.0.median .1f", "16.5"),
        ("share + ratio.dp4 .2f", "1.58"),
    ],
)
def test_a_number_is_shown_as_it_was_asked_for(asked: str, shown: str) -> None:
    assert fill_in(asked) == shown


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("ratio.dp8 .3f", "has no 'ratio.dp8': at 'dp8' there is dp4, dp2"),
        ("rows.dp=4.peak", "has no 'rows.dp=4.peak': at 'dp=4' there is a list"),
        ("rows.dp=8.peak", "has no 'rows.dp=8.peak': at 'dp=8' there is a list"),
        ("share?of*.1* .0%", "at '1*' there is 1,024 tokens, 16,384 tokens"),
        ("list.2 .3f", "has no 'list.2': at '2' there is a list"),
        ("share.x .3f", "has no 'share.x': at 'x' there is a float"),
        ("share", "needs a format such as .2f"),
        ("ratio .3f", "is no single value"),
        ("share .3q", "does not take the format '.3q'"),
        ("name .3f", "does not take the format '.3f'"),
        ("share / name .3f", "has no ratio for 'share / name': 0.3333 / 'veth'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(asked: str, said: str) -> None:
    with pytest.raises(measured.Unfit, match=re.escape(said)):
        fill_in(asked)


def build(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Build a book of one page strictly, with nothing but the role."""
    (folder / "book" / "results").mkdir(parents=True, exist_ok=True)
    (folder / "book" / "results" / "sample.json").write_text(json.dumps(STORED))
    (folder / "index.md").write_text(f"# A page\n\n{text}\n", encoding="utf-8")
    extensions = f"import sys\nsys.path.insert(0, {str(ROOT / 'book' / '_extensions')!r})\n"
    (folder / "conf.py").write_text(extensions + "extensions = ['myst_parser', 'measured']\n")
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going", "-b", "html"]
    return subprocess.run([*command, str(folder), str(folder / "out")], capture_output=True, text=True)


def test_a_page_shows_the_stored_number_its_source_and_a_newer_one_once_it_is_there(tmp_path: Path) -> None:
    table = "| in a table |\n|---|\n| {measured}`sample name`, {measured}`sample ratio.dp4 / share .1f` |"
    done = build(tmp_path, f"A ratio of {{measured}}`sample ratio.dp4 .3f`.\n\n{table}")
    page = tmp_path / "out" / "index.html"
    assert done.returncode == 0, done.stderr
    shown = '<abbr class="measured" title="book/results/sample.json: ratio.dp4">1.250</abbr>'
    assert shown in page.read_text(encoding="utf-8")
    assert ">veth</abbr>" in page.read_text(encoding="utf-8")
    (tmp_path / "book" / "results" / "sample.json").write_text(json.dumps(STORED | {"ratio": {"dp4": 1.5}}))
    again = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", str(tmp_path), str(tmp_path / "out")]
    subprocess.run(again, check=True, capture_output=True)
    assert ">1.500</abbr>" in page.read_text(encoding="utf-8"), "the page has not changed, the results have"


def test_a_number_that_is_not_there_fails_the_strict_build_and_names_page_and_path(tmp_path: Path) -> None:
    done = build(tmp_path, "{measured}`sample ratio.dp8 .3f`, {measured}`nothing a.b .3f`, {measured}`sample`.")
    assert done.returncode != 0
    for said in (
        "index.md:3: WARNING: measured: 'ratio.dp8': book/results/sample.json has no 'ratio.dp8'",
        "measured: 'a.b': there is no book/results/nothing.json; `make bench` writes it",
        "measured: 'sample' is not of the form `file path format`",
    ):
        assert said in done.stderr


# ---- The files, and what makes them -----------------------------------------------------------------------


def test_every_results_file_is_listed_with_its_question_and_says_where_it_was_taken() -> None:
    listed = set(re.findall(r"^\| `(\w+)\.json` \|", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    there = {path.stem for path in FOLDER.glob("*.json")}
    # there once somebody had a GPU, others' Muons, and a quiet machine
    assert there | {"gpu", "conformance", "chapters"} == listed
    for name in there:
        assert {"torch", "system", "cores"} <= set(results.load(name)["machine"]), name
        assert {"commit", "command"} <= set(results.load(name)), name


def test_bench_runs_each_measurement_alone_and_a_first_impression_leaves_the_results() -> None:
    for name, (script, *options) in bench.MEASUREMENTS.items():
        file = f"tools/{options[0]}.py" if script == "tools" else script
        assert (ROOT / "scripts" / file).is_file(), name
        full, quick = bench.command(name, quick=False), bench.command(name, quick=True)
        assert full == [f"scripts/{script}", *options, "--json", f"book/results/{name}.json"]
        assert ("--quick" in quick) == (name not in bench.SHORT)
        assert quick[-1] == f"out/quick/{name}.json"
    for place in measure.TAKERS.values():
        module, function = place.split(":")
        assert callable(getattr(importlib.import_module(module), function)), place


def test_bench_refuses_an_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "bytes", "byts"])
    with pytest.raises(launch.UsageError, match="there is no measurement 'byts'; there are bytes, memory, "):
        bench.parse()


def test_what_pages_say_of_one_gpu_is_what_it_has_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (FOLDER / "gpu.json").exists():
        pytest.skip("there is no book/results/gpu.json; `make gpu` writes it where there is a GPU.")
    found = results.load("gpu")
    for part in ("numerics", "speed", "steps", "collectives"):
        assert found["parts"][part]["ended"] == "well", part
    assert found["numerics"]["right"]
    assert found["collectives"]["right"]
    assert found["collectives"]["backend"] == "nccl"
    assert found["collectives"]["fsdp2_away"] == 0
    rows = {row["shape"]: row for row in found["speed"]["rows"]}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    schedule, gpu = quintics("muon", 5), torch.device("cuda")
    for name, row in rows.items():
        assert row["standard_ms"] <= 1.02 * row["gram_ms"], name  # the centred form is for CPUs
        taken = half_gram_pays([int(size) for size in name.split("x")], schedule, gpu)
        if taken and name != "1024x4096":  # which is for batches, and the page says so
            assert row["half_ms"] < 0.9 * row["standard_ms"], name
        if not taken:
            assert row["half_ms"] > row["standard_ms"], name
    assert rows["4096x16384"]["half_ms"] < 0.55 * rows["4096x16384"]["standard_ms"]  # "about half the time"
    assert rows["1024x4096"]["half_ms"] > rows["1024x4096"]["standard_ms"]
    ways = [row["optimizer"] for row in found["steps"]["rows"]]
    assert (ways[0], ways[2], ways[3]) == ("DistributedMuon owner", "MuonW", "torch.optim.Muon")
    page = " ".join((ROOT / "book" / "operations.md").read_text(encoding="utf-8").split())
    for fact in (found["machine"]["gpu"], found["machine"]["torch"], found["machine"]["python"].rpartition(".")[0]):
        assert fact in page
    assert len(found["gpus"]) == 1


# ---- Verdicts: a run that contradicts the claims page turns these red -----------------------------------------

PAGE = (ROOT / "book" / "claims.md").read_text(encoding="utf-8")
CARDS = re.findall(r"^\((claim-[\w-]+)\)=\n### (.+)\n((?:.|\n)*?)(?=^\(claim-|^## |\Z)", PAGE, re.MULTILINE)
VERDICT = re.compile(r"\s*(\{bdg-[\w-]+\}`[^`]+`) ")
FOLD = re.compile(r"^```\{dropdown\} What they counted, and what we found\n(.*?)^```$", re.MULTILINE | re.DOTALL)

MUON, ADAMW = "traces.trace_muon_FULLSTEP_dp2_tp2_rank0", "traces.trace_adamw_FULLSTEP_rank0"
ASYNC, ASYNC_ADAMW = (f"traces.trace_{run}_async_rank0" for run in ("muon_FULLSTEP_dp2_tp2", "adamw_FULLSTEP"))
WHOLE_MUON, WHOLE_ADAMW = (f"ranges.name={name}_Full_Training_Step.cpu_ms" for name in ("Muon", "AdamW"))
BF16 = "rows.dp=4,tp=1,shape=even,dtype=bfloat16,baseline={}.kept.masters+momentum+exp_avg+exp_avg_sq"

MEANS = "runs.run={}.communication_ms"
MUONS, ADAMWS = (f"runs.run=trace_{run}" for run in ("muon_FULLSTEP_dp2_tp2", "adamw_FULLSTEP"))
MOONLIGHT = "moonlight.baseline={},ranks={},tokens=16777216.{}"
LATER = "moonlight.baseline=muon_cut,ranks={},tokens=33554432.{}"
SENT = "reported_bytes.whole_step_bytes"
TUNED = "originals.fashion.tuned.median"
PEAK = "batches.tokens_per_rank={0},baseline={1}.peak / batches.tokens_per_rank={0},baseline=zero1.peak"
WITHOUT_COPY = "{0}.standing + {0}.stages.newton_schulz / batches.tokens_per_rank=64,baseline=zero1.peak".format(
    "batches.tokens_per_rank=64,baseline=muon_cut"
)

# claim -> verdict, and what must hold for it: file, path, least, most
TRIALS: dict[str, tuple[str, list[tuple[str, str, float, float]]]] = {
    "claim-bytes": ("holds as stated", [
        ("bytes", "compared.dp=4,tp=1,baseline=muon_cut.ratio", 1, 1.2501),
        ("bytes", "compared.dp=4,tp=1,baseline=muon.ratio", 1.2499, 1.2501),
        ("bytes", "ratios.dp=4,tp=1,dtypes=fp32*bf16.matrices", 1.2499, 1.2501),
        ("bytes", "ratios.dp=4,tp=1,dtypes=bf16*bf16.matrices", 1.26, 1.6),
        ("bytes", "compared.dp=4,tp=2,baseline=muon.ratio", 1.26, 3),
        ("bytes", "ratios.dp=4,tp=2,dtypes=fp32*bf16.matrices", 1.26, 3),
        ("bytes", "counted.equal", True, True),
    ]),
    "claim-near-one": ("holds with conditions", [
        ("worlds", "verdict.near_one.muon_cut_most", 1, 1.01),
        ("worlds", "verdict.near_one.muon_least", 1.2, 1.34),  # which is not the paper's layout
        ("worlds", "verdict.near_one.redundancy_most", 10, 256),
    ]),
    "claim-half": ("holds as stated", [
        ("memory", "kept.exact_halves / kept.halves", 1, 1),
        ("memory", "kept.exact_half_totals / kept.half_totals", 1, 1),
        ("memory", f"{BF16.format('muon')} / {BF16.format('zero1')}", 0.55, 0.95),
        ("memory", PEAK.format(1024, "muon"), 0.5, 0.99),
        ("memory", PEAK.format(64, "muon_single"), 0.5, 0.99),
        ("memory", PEAK.format(64, "muon_flat"), 1.01, 2),
        ("memory", PEAK.format(64, "muon_cut"), 1.01, 1.2),  # with gloo's copy, and without it
        ("memory", WITHOUT_COPY, 0.9, 0.99),
    ]),
    "claim-latency": ("holds with conditions", [
        ("regimes", "share.256.muon.0.median", 0.1, 100),
        ("regimes", "share.256.muon.-1.median / share.256.muon.0.median", 0, 0.5),
        ("worlds", "models.moonlight.newton_schulz_once_per_million_tokens", 0.01, 0.1),
        *[("worlds", MOONLIGHT.format("muon_cut", ranks, "extra"), 0, 0.01) for ranks in (32, 64, 128, 256)],
        ("worlds", MOONLIGHT.format("muon_cut", 64, "optimizer"), 0.01, 0.03),
        ("worlds", MOONLIGHT.format("muon_cut", 128, "optimizer"), 0.03, 0.1),
        ("worlds", LATER.format(128, "optimizer"), 0.01, 0.03),  # with the batch of nearly all of its training
        ("worlds", LATER.format(256, "optimizer"), 0.03, 0.1),
        ("worlds", MOONLIGHT.format("muon", 64, "extra"), 0.01, 0.03),  # the proof of concept
        ("worlds", MOONLIGHT.format("muon", 128, "extra"), 0.03, 0.06),
        ("worlds", "verdict.muon_cut.adds_at_most_3_percent.16*", 0.5, 1),
        ("worlds", "verdict.muon_cut.adds_at_most_3_percent.1,0*", 0, 0.5),
    ]),
    "claim-rms": ("holds with conditions", [
        ("claims", "update_rms_least", 0.7, 0.8),
        ("claims", "update_rms_most", 0.85, 1),
        ("claims", "update_rms_in_training.adamw.0.least", 0.9, 1.1),  # step 1 is the sign of the gradient
        ("claims", "update_rms_in_training.adamw.-1.median / update_rms_in_training.muon.-1.median", 0.5, 2),
        ("claims", "update_rms_in_training.muon.-1.most", 0.1, 0.2),
        ("claims", "update_rms_in_training.adamw.-1.median", 0.05, 0.2),
    ]),
    "claim-flops": ("open", [
        ("claims", "flops_share.least", 0.43, 0.519),
        ("claims", "flops_share.most", 0.43, 0.519),
        ("claims", "flops_share.claimed_at", 4.1, 25),
        ("claims", "flops_share.claimed_at_least", 4.1, 10),
        ("claims", "flops_share.claimed_at_most", 300, 500),
        ("learning", "races.language.to_adamw.operations", 0.1, 0.99),
        ("learning", "races.language.pairs.muon_adamw.wins", 8, 8),
        ("learning", "races.fashion.pairs.muon_adamw.wins", 8, 8),
        ("learning", "races.fashion.to_adamw.steps", 0.1, 0.9),
        ("learning", "races.fashion.to_adamw.operations", 1.01, 20),
        ("learning", "races.digits.pairs.muon_adamw.claimed", False, False),
    ]),
    "claim-bug-one": ("holds as stated", []),
    "claim-bug-two": ("not in the source", []),
    "claim-057": ("does not follow", [
        ("report_traces", f"{MUON}.name_matched_ms / {ADAMW}.name_matched_ms", 0.565, 0.575),
        ("report_traces", f"{MUON}.communication_ms / {ADAMW}.communication_ms", 0.58, 0.61),
        (
            "report_traces",
            f"{MEANS.format('trace_muon_FULLSTEP_dp2_tp2')} / {MEANS.format('trace_adamw_FULLSTEP')}",
            0.445,
            0.455,
        ),
        ("claims", "reported_bytes.over", 0.2, 0.3),
        ("claims", "reported_bytes.whole_step.2x2", 1.5, 2),
        ("claims", "reported_bytes.whole_step.4x1", 1.2499, 1.2501),
    ]),
    "claim-overhead": ("does not follow", [
        ("report_traces", f"{MUON}.optimizer_gpu_ms / {MUON}.busy_ms", 0.5, 0.7),
        ("report_traces", f"{MUON}.optimizer_gpu_computing_ms / {MUON}.busy_ms", 0.4, 0.5),
    ]),
    "claim-slower": ("does not follow", [
        ("report_traces", f"{MUON}.{WHOLE_MUON} / {ADAMW}.{WHOLE_ADAMW}", 1.145, 1.155),
        ("report_traces", f"{MUONS}.span_ms / {ADAMWS}.span_ms", 1.05, 1.15),
        ("report_traces", f"{MUONS}.span_without_pause_ms / {ADAMWS}.span_without_pause_ms", 1.3, 1.45),
        ("report_traces", f"{ADAMWS}.longest_pause_ms", 70, 80),
        ("report_traces", f"{MUONS}.longest_pause_ms", 0, 0.5),
        ("step_ratios", "by_tokens.0.muon.quartiles.0", 1.05, 5),  # slower, and less so with more tokens
        ("step_ratios", "by_tokens.0.muon.median / by_tokens.-1.muon.median", 1.1, 5),
        ("step_ratios", "by_tokens.-1.muon_cut.median", 1.01, 1.1),  # a few per cent
        ("step_ratios", "by_tokens.-1.muon_owner.median", 1.01, 1.1),
        ("step_ratios", "by_tokens.-1.muon.median", 1.2, 1.3),  # about a quarter
    ]),
    "claim-state": ("holds as stated", [("memory", "kept.exact_halves / kept.halves", 1, 1)]),
    "claim-async": ("does not follow", [
        ("report_traces", f"{ASYNC}.communication_sum_ms / {MUON}.communication_sum_ms", 2, 2.2),
        ("report_traces", f"{ASYNC}.span_ms / {MUON}.span_ms", 0.85, 1),
        ("traces", "loopback_2x2.ratio_to_synchronous.naive.median", 0.5, 1.5),
        ("traces", "loopback_2x2.ratio_to_synchronous.pipelined.median", 0.5, 1.5),
        ("traces", "loopback.ratio_to_synchronous.naive.median", 0.5, 1.5),
        ("traces", "loopback.ratio_to_synchronous.pipelined.median", 0.5, 1.5),
        ("traces", "links.1000.ratio_to_synchronous.pipelined.median", 0.3, 0.95),
    ]),
    "claim-async-adamw": ("does not follow", [
        ("report_traces", f"{ASYNC_ADAMW}.name_matched_ms / {ADAMW}.name_matched_ms", 1.53, 1.54),
        ("report_traces", f"{ASYNC_ADAMW}.communication_ms / {ADAMW}.communication_ms", 1.05, 1.1),
        ("report_traces", f"{ASYNC_ADAMW}.span_ms / {ADAMW}.span_ms", 0.97, 1),
        ("report_traces", f"{ASYNC_ADAMW}.span_without_pause_ms / {ADAMW}.span_without_pause_ms", 0.98, 1.02),
        ("step_ratios", "asynchronous_adamw.equal_parameters", True, True),
        ("step_ratios", "asynchronous_adamw.elapsed.median", 0.85, 1.15),  # about as long
        ("step_ratios", "asynchronous_adamw.durations.median", 3, 10),
        ("hiding", "links.500*.ratio_to_nothing_hidden.adamw.gradients.median", 0.5, 0.9),
    ]),
    "claim-projection": ("does not follow", [
        ("claims", "projection.printed.x3.muon", 693.5, 694.5),
        ("claims", "projection.printed.x3.adamw", 1019.5, 1020.5),
        ("claims", "projection.printed.x1.over_adamw", 0.75, 0.85),  # its sum, of a step that is slower:
        ("claims", "projection.parts.muon.measured_ms / projection.parts.adamw.measured_ms", 1.145, 1.155),
        ("claims", "projection.once.x3.over_adamw", 0.9, 1),
        ("claims", "projection.whole.x3.over_adamw", 1.01, 1.5),
        ("claims", "projection.whole.x3.over_adamw_same_grid", 1.72, 2.1),  # above the ratio of their bytes
        ("claims", "projection.nodes.x3.over_adamw", 1.01, 1.5),
        ("report_traces", f"{MUONS}.computation_ms / {ADAMWS}.computation_ms", 2, 2.2),  # more than in bytes
        ("claims", "reported_bytes.whole_step.2x2", 1.01, 1.99),
        ("claims", "projection.nodes.x3.over_adamw_same_grid", 1.5, 2),
        ("worlds", MOONLIGHT.format("muon_cut", 32, "extra"), 0, 0.01),
    ]),
    "claim-sweet-spot": ("open", [
        ("worlds", "verdict.muon.square_wins_step", 0, 0.5),
        ("worlds", "verdict.muon.square_wins_communication_then", 0, 0.25),
        ("worlds", "verdict.muon.most_tp_wins_communication", 0.9, 1),
        ("claims", f"{SENT}.2x2 / {SENT}.4x1", 0.3, 0.7),
        ("claims", f"{SENT}.1x4 / {SENT}.2x2", 0.2, 0.7),
        ("regimes", "skew.dp=2,tp=4.muon.sent_bytes / skew.dp=8,tp=1.muon.sent_bytes", 0, 0.99),
        ("regimes", "skew.dp=2,tp=4.muon.sent_bytes / skew.dp=1,tp=8.muon.sent_bytes", 0, 0.99),
        ("regimes", "skew.dp=2,tp=4.zero1.sent_bytes / skew.dp=8,tp=1.zero1.sent_bytes", 0, 0.99),
        ("regimes", "skew.dp=2,tp=4.zero1.sent_bytes / skew.dp=1,tp=8.zero1.sent_bytes", 0, 0.99),
    ]),
    "claim-fewer-steps": ("not in the source", [("claims", "flops_share.most", 0.43, 0.519)]),
    "claim-cifar": ("open", [
        ("learning", "originals.fashion.as_written.muon_over_adamw.training_loss", 0.5, 0.75),
        ("learning", "originals.fashion.tuned.muon_over_adamw.training_loss", 0.5, 0.9),
        ("learning", "originals.fashion.as_written.muon_against_adamw.test_loss.claimed", True, True),
        ("learning", "originals.fashion.tuned.muon_against_adamw.test_loss.wins", 5, 5),
        ("learning", f"{TUNED}.muon.test_loss / {TUNED}.adamw.test_loss", 0.5, 0.95),
        ("learning", "originals.fashion.flops_over_network", 15, 25),
        ("claims", "tutorial_time.mnist", 1.26, 1.28),
        ("claims", "tutorial_time.cifar10", 0.95, 1),
    ]),
    "claim-olmo": ("open", [
        ("claims", "still_matrices.fsdp1", 0, 0),
        ("claims", "still_matrices.fsdp2 / matrices_handed_over.fsdp2", 1, 1),
    ]),
}  # fmt: skip


def test_every_claim_has_all_parts_and_stands_in_the_table_with_its_verdict() -> None:
    assert [label for label, _, _ in CARDS] == list(TRIALS)
    for label, title, card in CARDS:
        badge = VERDICT.match(card)
        assert badge is not None, label
        assert re.search(rf"`{TRIALS[label][0]}`$", badge[1]), label
        assert re.search(
            rf"^\| \[{re.escape(title)}\]\({label}\), [\w ]+ \| [^|]+ \| [^|]+ \| {re.escape(badge[1])} \|$",
            PAGE,
            re.MULTILINE,
        )
        theirs, ours, command = parts_of(card)[1:]
        assert theirs.startswith("**"), label
        assert ours.startswith("**We "), label
        assert "`" in command, label


def parts_of(card: str) -> tuple[str, str, str, str]:
    """Return the verdict with its words, what others say and counted, what we found, and what to try."""
    fold = FOLD.search(card)
    if fold is None:
        return card, "", "", ""
    begin = fold[1].index("**We ")
    ours, _, command = fold[1][begin:].partition("\nTry ")
    return card[: fold.start()], fold[1][:begin], ours, command


NOT_OURS = (  # what a file says, code, links, formulas; and names: of grids, ranks, steps, chapters, AdamW's β₂
    r"\{\w+\}`[^`]*`", r"`[^`]*`", r"\]\([^)]*\)", r"\$[^$]*\$", r"\d+ × \d+", r"[DT]P \d+", r"\b(?:rank|step) \d+",
    r"\b[\d, ]+and \d+ ranks", r"[Cc]hapters? \d+", r"section [\d.]+", r"β₂ [\d.]+",
)  # fmt: skip
NUMBER = re.compile(r"(?<![\w.,-])\d[\d.,]*\d|(?<![\w.,-])\d")


def typed(card: str) -> set[str]:
    """Return the numbers of a card that are neither read from a file nor its source's own, as quoted in the card."""
    title, _, rest = card.partition("\n")
    verdict, theirs, found, _ = parts_of(rest)
    ours = re.sub("|".join(NOT_OURS), " ", verdict + found)
    return set(NUMBER.findall(ours)) - set(NUMBER.findall(title + theirs))


def test_a_typed_measurement_is_seen() -> None:
    ours = "**We found** on DP 4 {measured}`a b .2f` of 20 %, 1.27 times.\n\nTry 7."
    fold = (
        f"```{{dropdown}} What they counted, and what we found\n**They say** so.\n\n**They counted** 8.\n\n{ours}\n```"
    )
    assert typed(f"T: 20 %\n{{bdg-x}}`open` It is 4.5.\n\n{fold}\n") == {"1.27", "4.5"}


def test_no_number_of_ours_is_typed_on_the_claims_page() -> None:
    for label, title, card in CARDS:
        assert typed(f"{title}\n{card}") == set(), (
            f"{label}: read it from a results file: {{measured}}`file path format`"
        )
    table = re.findall(r"^\| \[.+\]\(claim-[\w-]+\).* \| ([^|]+) \| \{bdg", PAGE, re.MULTILINE)
    assert len(table) == len(TRIALS)
    assert NUMBER.findall(re.sub("|".join(NOT_OURS), " ", " ".join(table))) == []
    seen = PAGE[PAGE.index("\n## What nobody claims, though it can be seen") :]
    assert NUMBER.findall(re.sub("|".join(NOT_OURS), " ", seen)) == []


@pytest.mark.parametrize("label", [label for label, (_, conditions) in TRIALS.items() if conditions])
def test_the_numbers_say_what_the_verdict_says(label: str) -> None:
    verdict, conditions = TRIALS[label]
    for name, path, least, most in conditions:
        value = measured.value_of(results.load(name), path)
        if value is None:
            pytest.skip(f"{name}: {path} was not measured on the machine of the stored results")
        assert least <= value <= most, f"{verdict!r} needs {name} {path} between {least} and {most}"


def test_the_tutorials_batch_is_half_of_that_of_the_race() -> None:
    from muonbook.ch04 import originals, tasks

    assert tasks.TASKS["fashion"].batch == 2 * originals.BATCH


def test_the_asynchronous_run_of_adamw_divides_gradients_while_they_are_summed() -> None:
    """In each of five steps, work begins with the all-reduce of the large matrix; awaited, nothing does."""
    for of, together in ((ADAMW, 0), (ASYNC_ADAMW, 5)):
        timeline = measured.find(results.load("report_traces"), f"{of}.timeline")
        large = [(start, end) for start, end, _ in timeline["collectives"] if end - start > 10]
        begun = [any(start <= at < start + 0.2 < end for at, _ in timeline["work"]) for start, end in large]
        assert (len(large), sum(begun)) == (5, together)


def test_each_of_the_five_fixes_names_an_exhibit_or_a_test_that_is_there() -> None:
    from muonbook.ch11 import museum

    table = PAGE[PAGE.index("### Each of its five fixes") : PAGE.index("(claim-bug-one)=")]
    exhibits, tests = re.findall(r'`--exhibit "([^"]+)"`', table), re.findall(r"`(test_\w+)`", table)
    assert (len(exhibits), len(tests)) == (2, 3)
    assert set(exhibits) <= museum.EXHIBITS.keys()
    launching = (ROOT / "tests" / "engine" / "launch" / "test_launch.py").read_text(encoding="utf-8")
    assert all(f"\ndef {name}(" in launching for name in tests)


def test_the_page_shows_a_number_for_every_condition_of_a_verdict_or_says_it_in_words() -> None:
    shown = set(re.findall(r"\{measured\}`(\w+) ([^`]+?)(?: [.,][^ `]*)?`", PAGE))
    for label, (_, conditions) in TRIALS.items():
        files = {name for name, _, _, _ in conditions}
        card = next(card for found, _, card in CARDS if found == label)
        assert files <= {name for name, _ in shown if f"`{name} " in card}, label


def test_each_claim_names_the_command_behind_every_number_of_a_claim_and_no_other() -> None:
    for label, _, card in CARDS:
        files = set(re.findall(r"\{measured\}`(\w+) ", card))
        said = parts_of(card)[3]
        named = {name for names in re.findall(r'`make bench NAMES="?([\w ]+)"?`', said) for name in names.split()}
        assert files == named | ({"report_traces"} if "`make traces`" in said else set()), label
        assert named <= set(bench.MEASUREMENTS), label
