"""The trainer: the same training on every grid and through every stop, and one sentence for what cannot be."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import train
import train_workers
import worlds
from torch.distributed import run as torchrun

from distmuon import checkpoint, launch
from distmuon.models import run_settings
from distmuon.models.run_settings import RunSettings

TRAIN = str(worlds.ROOT / "scripts" / "train.py")
ALONE = launch.World(0, 1, 1, 1, "gloo", "cpu", 1.0, 1, 0)  # whose timeout is one second
SMALL = RunSettings(width=16, context=16, batch=16, steps=6, warmup=2, log_every=1, evaluate_every=6, save_every=3)


def scalar(folder: Path, name: str) -> dict[int, float]:
    """Return what a run has written down under this name, by step; of a step that was repeated, the later one."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["scalars"][name] for record in records if name in record["scalars"]}


def losses(folder: Path) -> list[float]:
    return list(scalar(folder, "loss").values())


def run(folder: Path, dp: int = 2, tp: int = 1, **changes: Any) -> train.Ended:
    settings = dataclasses.replace(SMALL, folder=str(folder), **changes)
    return launch.run(train.train, (settings,), dp=dp, tp=tp)[0]


def words(folder: Path, dp: int = 2, **changes: Any) -> list[str]:
    """Return a command line for the small run."""
    given = {field.name: getattr(SMALL, field.name) for field in dataclasses.fields(SMALL)} | {"folder": folder}
    of_fsdp2 = given.keys() - {"strategy", "tensorboard"}
    options = {name: given[name] for name in of_fsdp2} | {"dp": dp} | changes
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def contents(folder: Path) -> list[torch.Tensor]:
    """Return all whole tensors of a checkpoint, those of the optimizer too."""
    model, optimizer, _ = train.build(ALONE, SMALL, 256)
    checkpoint.load(folder, model, optimizer)
    states = [optimizer.state[p][key] for p in model.parameters() for key in sorted(optimizer.state[p])]
    assert len(states) > len(list(model.parameters()))
    return [*model.parameters(), *states]


def same_bits(one: Path, other: Path) -> bool:
    return all(torch.equal(a, b) for a, b in zip(contents(one), contents(other), strict=True))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on two ranks that all others are held against."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(folder) == train.Ended(6)
    assert losses(folder)[-1] < losses(folder)[0] - 0.5
    return folder


# ---- One training, on every grid --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "changes"),
    [
        ((1, 1), {}),
        ((2, 2), {}),
        ((2, 1), {"accumulate": 4}),
        ((2, 2), {"sharding": "zero1"}),
    ],
    ids=str,
)
def test_every_grid_trains_the_same(
    undisturbed: Path, tmp_path: Path, grid: tuple[int, int], changes: dict[str, Any]
) -> None:
    run(tmp_path, *grid, **changes)
    assert losses(tmp_path) == pytest.approx(losses(undisturbed), abs=2e-3)


@pytest.mark.parametrize("changes", [{"optimizer": "adamw"}, {"dtype": "bfloat16"}], ids=str)
def test_other_choices_train_alike_wherever(tmp_path: Path, changes: dict[str, Any]) -> None:
    found = []
    for number, (grid, sharding) in enumerate([((2, 1), "fsdp2"), ((1, 2), "zero1")]):
        run(folder := tmp_path / str(number), *grid, sharding=sharding, **changes)
        found.append(losses(folder))
        assert found[-1][-1] < found[-1][0] - 0.1
    close = 0.03 if "dtype" in changes else 2e-3  # bf16 rounds weights on one side, products on the other
    assert found[1] == pytest.approx(found[0], abs=close)


def test_the_learning_rate_rises_then_falls_along_the_schedule() -> None:
    settings = RunSettings(lr=2.0, warmup=10, steps=110)
    assert [settings.lr_at(step) for step in (1, 10)] == [0.2, 2.0]
    for schedule, half in (("cosine", 1.0), ("linear", 1.0), ("constant", 2.0)):
        rates = [dataclasses.replace(settings, schedule=schedule).lr_at(step) for step in range(10, 111)]
        assert rates[50] == pytest.approx(half)
        assert rates == sorted(rates, reverse=True)
    assert RunSettings(lr=2.0, warmup=0).lr_at(1) > 1.98


def test_every_group_waits_as_long_as_it_was_told() -> None:
    for limits in launch.run(train_workers.timeouts, (SMALL,), dp=2, tp=2, timeout=700):
        assert len(limits) >= 3
        assert set(limits) == {700.0}


# ---- What it says -----------------------------------------------------------------------------------------


def test_a_run_says_what_it_will_do_and_what_it_has_done_with_units(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ending = worlds.finish(TRAIN, *words(folder, 1, tp=2, sharding="zero1"))
    assert (ending.code, ending.err) == (0, "")
    lines = ending.out.splitlines()
    assert lines[:9] == [
        "model       14,752 parameters, 2 layers of width 16 and 4 heads, in float32; sees 16 tokens",
        "text        alice: 133,628 tokens to learn from, 14,848 held out; a token is one byte",
        "grid        1 DP x 2 TP = 2 ranks, gloo on cpu, sharded by ZeRO-1",
        "optimizer   DistributedMuon, strategy owner; weight decay 0.1; gradients: norm clipped to 1",
        "Muon        6,144 parameters in 12 tensors: blocks.*.{query, key, value, out, up, down}",
        "AdamW       8,608 parameters in 13 tensors: tokens, positions, norm, head, blocks.*.{norm1, norm2}",
        "lr          0.01 after 2 steps of warm-up, then cosine to 0 in step 6, but never below 0.0001",
        "steps       1 to 6, each 16 sequences x 16 tokens = 256 tokens; in all 0.01 times the text",
        f"folder      {folder}, every 3 steps; keeps the newest 3 checkpoints",
    ]
    step = r"step +{} +loss \d\.\d{{3}} nats per byte +gradient norm \d\.\d\d +lr 0\.\d{{4}} +[\d,]+ tokens per second"
    for number, line in enumerate(lines[9:15], 1):
        assert re.fullmatch(step.format(number), line)
    nats = scalar(folder, "held_out_loss")[6]
    held_out = f"{nats:.3f} nats ({nats / math.log(2):.3f} bits) per byte"
    assert lines[15] == f"step     6   held out {held_out}"
    assert re.fullmatch(
        r"trained +6 steps, 1,536 tokens, in \d+\.\d s; [\d,]+ tokens per second while training", lines[16]
    )
    assert lines[17:19] == [f"held out    {held_out} after step 6", f"checkpoint  {folder}/step-000006"]
    assert re.fullmatch(rf"try it      \S+ \S*scripts/generate\.py {folder}", lines[19])
    assert len(lines) == 20


def test_a_run_without_a_folder_says_that_it_keeps_nothing_and_adamw_alone_is_said(
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings = dataclasses.replace(SMALL, optimizer="adamw", clip=math.inf, text="language", schedule="constant")
    launch.run(train.train, (settings,))
    said = capfd.readouterr().out
    for line in (
        "folder      none, so nothing is saved; give --folder FOLDER to keep checkpoints and metrics.jsonl",
        "optimizer   MuonW; weight decay 0.1; gradients: not clipped",
        "grid        1 DP x 1 TP = 1 rank, gloo on cpu, sharded by FSDP2",
        "lr          0.01 after 2 steps of warm-up, then constant",
    ):
        assert f"{line}\n" in said
    floor = train.corpus("language").floor
    assert re.search(rf"held out .* per letter, the least possible is {floor:.3f} nats after step 6\n\Z", said)
    assert not re.search("^(Muon|checkpoint|try it) ", said, re.MULTILINE)


def test_what_is_measured_is_in_the_metrics_in_nats_and_tokens_per_second(tmp_path: Path) -> None:
    run(tmp_path, dp=1, evaluate_every=2, log_every=3)
    held_out = scalar(tmp_path, "held_out_loss")
    assert list(held_out) == [2, 4, 6]
    assert list(scalar(tmp_path, "loss")) == list(scalar(tmp_path, "tokens_per_second")) == [3, 6]
    assert min(scalar(tmp_path, "tokens_per_second").values()) > 0
    model, *_ = train.build(ALONE, SMALL, 256)
    checkpoint.load(tmp_path / "step-000006", model)
    tokens, following = train.corpus("alice").held_out_windows(4 * SMALL.batch, SMALL.context)
    wanted = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten()).item()
    assert held_out[6] == pytest.approx(wanted, abs=1e-5)


def test_the_clock_leaves_out_what_is_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(train.time, "perf_counter", lambda: now)
    clock = train.Clock(tokens=50, window=2)
    for seconds, speed in ((1.0, 50.0), (4.0, 20.0), (6.0, 10.0)):  # of the last two steps
        now += seconds
        assert clock.step() == pytest.approx(speed)
        with clock.paused():
            now += 7.0
    assert (clock.training(), clock.seconds()) == (11.0, 32.0)


def test_it_needs_nothing_but_what_the_wheel_brings() -> None:
    for program in ("train.py", "generate.py"):
        tree = ast.parse((worlds.ROOT / "scripts" / program).read_text())
        named = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        named |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {name.partition(".")[0] for name in named} <= {"torch", "numpy", "distmuon"} | sys.stdlib_module_names


# ---- Through every stop -----------------------------------------------------------------------------------


def test_what_is_resumed_ends_at_the_bits_of_what_was_never_stopped(undisturbed: Path, tmp_path: Path) -> None:
    shutil.copytree(undisturbed / "step-000003", tmp_path / "step-000003")
    assert run(tmp_path) == train.Ended(6)
    assert losses(tmp_path) == losses(undisturbed)[3:]
    assert same_bits(tmp_path / "step-000006", undisturbed / "step-000006")


def test_it_is_resumed_on_another_grid_and_with_another_sharding(undisturbed: Path, tmp_path: Path) -> None:
    shutil.copytree(undisturbed / "step-000003", tmp_path / "step-000003")
    run(tmp_path, 2, 2, sharding="zero1")
    assert losses(tmp_path) == pytest.approx(losses(undisturbed)[3:], abs=2e-3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch": 32}, "cannot go on with --batch 32 instead of 16; give the same, or another --folder."),
        ({"seed": 1}, "cannot go on with --seed 1 instead of 0; give the same, or another --folder."),
        ({"heads": 2}, "cannot go on with --heads 2 instead of 4; give the same, or another --folder."),
        ({"text": "language"}, "load one of the same model"),
        ({"steps": 5}, "has made 6 steps, and --steps 5 asks for fewer; ask for more, or give another --folder."),
        (
            {"width": 32},
            "is float32 [256, 16] in the checkpoint and float32 [256, 32] here; load one of the same model",
        ),
        ({"optimizer": "adamw"}, "was trained by muon in MuonW, and is trained here by adamw in MuonW"),
    ],
    ids=str,
)
def test_another_run_is_not_gone_on_with(undisturbed: Path, tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    shutil.copytree(undisturbed, tmp_path / "run")
    assert says in run(tmp_path / "run", dp=1, **changes).refused
    assert losses(tmp_path / "run") == losses(undisturbed)


def test_another_text_of_the_same_name_is_refused_and_the_same_text_of_another_name_is_not(tmp_path: Path) -> None:
    (mine := tmp_path / "mine.txt").write_bytes(b"The same old song. " * 600)
    assert run(tmp_path / "run", dp=1, text=str(mine)) == train.Ended(6)
    mine.rename(renamed := tmp_path / "renamed.txt")
    assert run(tmp_path / "run", dp=1, text=str(renamed), steps=7) == train.Ended(7)
    mine.write_bytes(b"Another song, in its place. " * 600)
    before = {path.name for path in (tmp_path / "run").iterdir()}
    words = (
        rf"the run in {tmp_path}/run was trained on {renamed} \(11,400 tokens, [0-9a-f]{{8}}…\), and this is another "
        rf"text, {mine} \(16,800 tokens, [0-9a-f]{{8}}…\); give the same, or another --folder\."
    )
    assert re.fullmatch(words, run(tmp_path / "run", dp=1, text=str(mine), steps=8).refused)
    assert {path.name for path in (tmp_path / "run").iterdir()} == before


def test_ranks_that_read_different_texts_are_refused() -> None:
    for refused in launch.run(train_workers.texts_differ, (SMALL,), dp=2):
        assert refused == "rank 1 reads another text than rank 0; give every machine the same file."


def test_what_changes_the_rest_of_a_run_is_said_and_done(
    undisturbed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(undisturbed / "step-000003", tmp_path / "step-000003")
    changes: dict[str, Any] = {"lr": 0.002, "weight_decay": 0.3, "schedule": "linear", "warmup": 1, "steps": 7}
    changes |= {"clip": 0.5, "dtype": "bfloat16", "save_every": 7}
    run(tmp_path, dp=1, **changes)
    said = capfd.readouterr().out
    for words in (
        "--lr is 0.002 now, was 0.01", "--weight-decay is 0.3 now, was 0.1", "--schedule is linear now, was cosine",
        "--warmup is 1 now, was 2", "--steps is 7 now, was 6", "--clip is 0.5 now, was 1.0",
        "--dtype is bfloat16 now, was float32",
    ):  # fmt: skip
        assert f"step     3   {words}\n" in said
    assert said.count(" now, was ") == len(changes) - 1  # how often it saves changes nothing
    now = dataclasses.replace(SMALL, **changes).lr_at(4)
    assert f"step     3   learning rate 0.00854 in step 3, {now:.3g} in step 4\n" in said
    manifest = json.loads((tmp_path / "step-000007" / "manifest.json").read_text())
    assert {group["options"]["weight_decay"] for group in manifest["notes"]["groups"]} == {0.3}


def test_the_same_command_says_nothing_of_changes_and_that_a_finished_run_is_finished(
    undisturbed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(undisturbed, tmp_path / "run")
    assert run(tmp_path / "run", dp=1) == train.Ended(6)
    said = capfd.readouterr().out.splitlines()
    assert said[0].startswith("step     6   gone on from ")
    assert (
        said[1] == "step     6   was the last of --steps 6, so there is nothing left to do; give more --steps to go on"
    )
    names = [line.split()[0] for line in said[2:]]
    assert names == ["model", "text", "grid", "optimizer", "Muon", "AdamW", "lr", "folder", "checkpoint", "try"]


def test_a_second_run_in_the_folder_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with worlds.command(TRAIN, *words(folder, 1, steps=100_000, save_every=100_000)) as running:
        running.wait_for("step     5   loss")
        second = worlds.answer(TRAIN, *words(folder, 1, steps=100_000, lr=0.5))
        running.interrupt(signal.SIGTERM)
        first = running.end()
    assert (second.code, second.out) == (2, "")
    assert re.fullmatch(r"error: \S+/run is in use by another .*, or give .*\.\n", second.err)
    assert (first.code, first.err) == (128 + signal.SIGTERM, "")
    (made,) = re.findall(r"stopped after step (\d+) of", first.out)
    assert list(scalar(folder, "loss")) == list(range(1, int(made) + 1))


def test_under_torchrun_a_folder_in_use_is_waited_for_and_the_loop_around_may_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = dataclasses.replace(SMALL, folder=str(tmp_path))
    with train.claim_patiently(ALONE, str(tmp_path)):
        monkeypatch.setattr(launch, "under_torchrun", lambda: True)
        ended = train.train(ALONE, settings)
        monkeypatch.undo()
        assert not train.train(ALONE, settings).again
    assert ended.again
    assert capfd.readouterr().out == f"waiting     {ended.refused}\n"
    assert ended.refused.startswith(f"{tmp_path} is in use by another ")
    monkeypatch.setattr(launch, "run", lambda *_, **__: [ended])
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(launch.WorldError, match="is in use by another"):
        train.main()


def test_a_package_that_is_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert "needs the package tensorboard" in run(tmp_path, dp=1, tensorboard=True).refused
    assert {path.name for path in tmp_path.iterdir()} <= {"lock"}


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    run(tmp_path, dp=1, save_every=1, keep=2)
    assert checkpoint.saved_steps(tmp_path)[:2] == [6, 5]
    assert len(checkpoint.saved_steps(tmp_path)) <= 3  # the last save may end after the last look


SMALL_FILES = (  # larger ones cannot be written, as on a disk that is full
    "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, resource.RLIM_INFINITY)); "
    "import train; train.launch.command(train.main)"
)


def test_a_run_that_could_not_be_saved_says_why_and_what_is_left_and_fails(undisturbed: Path, tmp_path: Path) -> None:
    shutil.copytree(undisturbed / "step-000003", tmp_path / "run" / "step-000003")
    ending = worlds.finish("-c", SMALL_FILES, *words(tmp_path / "run", 1, log_every=100))
    reason = f"{tmp_path}/run/step-000006 was not saved: OSError: [Errno 27] File too large"
    left = f"the newest checkpoint in {tmp_path}/run is of step 3"
    assert (ending.code, ending.err) == (1, f"error: {reason}; {left}.\n")
    assert f"step     6   {reason}.\n" in ending.out


def test_a_run_that_diverged_says_so_and_what_is_left(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(launch, "run", lambda *_, **__: [train.Ended(17, diverged=True)])
    assert train.main() == 1
    words = "10 steps in a row had no finite loss and gradient; lower --lr; there is no checkpoint."
    assert capsys.readouterr().err == f"error: {words}\n"


@pytest.mark.alone
def test_torchrun_passes_the_signal_on_and_every_rank_leaves(tmp_path: Path) -> None:
    """Of a launcher of ours: chapter 18's drills."""
    started = "-m torch.distributed.run --standalone --nproc-per-node 2"
    with worlds.command(*started.split(), TRAIN, *words(tmp_path / "run", steps=100_000)) as running:
        running.wait_for("step     5   loss")
        running.interrupt(signal.SIGTERM)
        ending = running.end()
    said = re.search(r"stopped after step (\d+) of 100000; saved in", ending.out)
    assert said
    assert checkpoint.saved_steps(tmp_path / "run")[0] == int(said[1])


# ---- What is not finite -----------------------------------------------------------------------------------


def test_steps_that_are_not_finite_are_skipped_and_ten_in_a_row_end_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build: Callable[..., Any] = train.build
    bad = {2, 4, 5, *range(8, 30)}
    step = 0

    def build_with_bad_steps(*arguments: Any) -> Any:
        model, optimizer, forward = build(*arguments)

        def sometimes(*batch: Any) -> Any:
            nonlocal step
            step += batch[0].requires_grad is False and torch.is_grad_enabled()
            return forward(*batch) * (math.nan if step in bad else 1)

        return model, optimizer, sometimes

    monkeypatch.setattr(train, "build", build_with_bad_steps)
    ended = run(tmp_path, dp=1, steps=100)
    said = capfd.readouterr().out
    assert ended == train.Ended(17, diverged=True)
    assert "step     2   skipped: loss nan, gradient norm nan (1 of 10)" in said
    assert "step     5   skipped: loss nan, gradient norm nan (2 of 10)" in said
    assert "step    17   skipped: loss nan, gradient norm nan (10 of 10)" in said
    assert checkpoint.saved_steps(tmp_path) == [6, 3]  # none from within the storm
    assert all(map(math.isfinite, losses(tmp_path)[:1]))
    assert list(scalar(tmp_path, "loss")) == [step for step in range(1, 18) if step not in bad]


# ---- What it is told --------------------------------------------------------------------------------------


def settings_of(*words: str) -> RunSettings:
    return run_settings.parse(train.__doc__, list(words))[1]


def test_a_file_says_what_the_command_line_leaves_open_and_a_later_file_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all are found at home, where no shell has looked."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.txt").write_bytes(b"The same old song. " * 600)
    (tmp_path / "first.toml").write_text('text = "~/mine.txt"\ntensorboard = true\nsave_every = 7\nlr = 0.5\ndp = 2\n')
    (tmp_path / "second.toml").write_text("tensorboard = false\n")
    both = ["--folder=~/out", "--config=~/first.toml", "--config=~/second.toml"]
    found = settings_of(*both, "--lr", "0.25")
    assert (found.lr, found.save_every, found.tensorboard) == (0.25, 7, False)
    assert (found.text, found.folder) == (f"{tmp_path}/mine.txt", f"{tmp_path}/out")
    assert settings_of(*both, "--tensorboard").tensorboard
    assert not settings_of(*both[:2], "--no-tensorboard").tensorboard


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("learning_rate = 1", "learning_rate is no option that a file may give; see --help."),
        ('config = "other.toml"', "config is no option that a file may give; see --help."),
        ("lr = false", "lr is false; give it a value, or leave it out."),
        ("folder = true", "folder is true; give it a value, or leave it out."),
        ("lr = [1, 2]", "lr is a list; give one value."),
        ("[optimizer]\nlr = 1", "optimizer is a dict; give one value."),
        ("lr: 1", "is no TOML"),
        ('steps = "many"', "argument --steps: invalid int value: 'many'; see --help."),
        ("steps = 0", "--steps 0: must be from 1 to 1,000,000,000."),
    ],
)
def test_a_file_that_says_nothing_sensible_is_refused(tmp_path: Path, written: str, says: str) -> None:
    (config := tmp_path / "run.toml").write_text(written)
    with pytest.raises(launch.UsageError, match=re.escape(says)):
        settings_of("--config", str(config))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--optimizer lion", "--optimizer lion is unknown; choose one of muon, adamw."),
        ("--strategy owner", "--strategy goes with --sharding zero1 and --optimizer muon; leave it out."),
        ("--save-every 5", "--save-every does nothing without --folder FOLDER."),
        ("--width 30", "--width 30: --heads 4 does not divide it."),
        ("--tp 3", "--heads 4: --tp 3 does not divide them."),
        ("--dp 3", "--batch 32 cannot be shared out to --dp 3 times --accumulate 1; choose a multiple of 3."),
        ("--text no/such/file", "text no/such/file: cannot be read (No such file or directory); name a file, or alice"),
        ("--context 20000", "--context 20000: 14,848 tokens of this text are held out; choose fewer."),
        ("--lr nan", "--lr nan: must be from 1e-09 to 100."),
        ("--folder /proc/x", "--folder /proc/x/metrics.jsonl: cannot be written"),
        ("--folder=", "--folder '': an empty path; name a folder, or leave it out."),
        ("--folder /dev/null", "--folder /dev/null: cannot be read (Not a directory); name another folder."),
        ("--step 5", "unrecognized arguments: --step 5; see --help."),
        ("--config no.toml", "--config no.toml: cannot be read (No such file or directory); name a TOML file."),
    ],
)
def test_what_cannot_be_is_one_sentence(line: str, says: str) -> None:
    with pytest.raises(launch.UsageError) as error:
        settings_of(*line.split())
    assert str(error.value).startswith(says)


def test_a_folder_that_cannot_be_looked_into_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:  # permission bits do not stop the root user
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(run_settings.os, "listdir", refuse)
    with pytest.raises(launch.UsageError) as error:
        settings_of("--folder", str(tmp_path))
    assert str(error.value) == f"--folder {tmp_path}: cannot be read (Permission denied); name another folder."
    assert settings_of("--folder", str(tmp_path / "new")).folder == str(tmp_path / "new")


def test_torchrun_understands_every_option() -> None:
    """It takes a prefix of one of its own options for that option, even behind the name of the program."""
    help_page = torchrun.get_args_parser().format_help()
    theirs = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", help_page))
    settings = [setting.name for setting in dataclasses.fields(RunSettings)]
    ours = {f"--{name.replace('_', '-')}" for name in [*settings, *launch.WORLD, "config", "no_tensorboard"]}
    assert len(theirs) > 20
    assert not [(mine, other) for mine in ours for other in theirs if other.startswith(mine)]
