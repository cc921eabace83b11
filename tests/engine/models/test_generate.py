"""Text from a checkpoint: what the model expects, the same for the same options; one sentence for what cannot be."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
from pathlib import Path

import generate
import pytest
import torch
import train
import worlds

from distmuon import checkpoint, launch
from distmuon.models.run_settings import RunSettings

GENERATE = str(worlds.ROOT / "scripts" / "generate.py")
SMALL = RunSettings(width=16, context=16, batch=16, steps=4, warmup=2, save_every=2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs: "bytes" of Alice, on a grid, in bfloat16, and "letters" of the language."""
    home = tmp_path_factory.mktemp("runs")
    of_bytes = dataclasses.replace(SMALL, folder=str(home / "bytes"), sharding="zero1", dtype="bfloat16")
    launch.run(train.train, (of_bytes,), dp=1, tp=2)
    launch.run(train.train, (dataclasses.replace(SMALL, folder=str(home / "letters"), text="language"),))
    return home


def written(*words: str) -> tuple[str, str]:
    ending = worlds.answer(GENERATE, *words)
    assert ending.code == 0, ending.err
    return ending.out, ending.err


def test_a_runs_folder_is_enough_and_its_newest_checkpoint_is_taken(runs: Path) -> None:
    folder = str(runs / "bytes")
    out, err = written(folder, "--prompt", "Alice ", "--length", "50")
    assert err == f"{folder}/step-000004: 50 tokens at temperature 0.8, seed 0\n"
    assert out.startswith("Alice ")
    assert len(out.encode()) >= len("Alice \n") + 50  # a byte that is no UTF-8 becomes a character of three
    assert written(f"{folder}/step-000004", "--prompt=Alice ", "--length=50") == (out, err)
    assert written(folder, "--prompt=Alice ", "--length=50", "--seed=1")[0] != out
    assert written(f"{folder}/step-000002", "--prompt=Alice ", "--length=50")[0] != out


def test_without_a_prompt_there_is_only_what_the_model_writes(runs: Path) -> None:
    out, _ = written(str(runs / "letters"), "--length", "40")
    assert re.fullmatch("[a-z ]{40}\n", out)
    assert written(str(runs / "letters"), "--length", "40", "--prompt", " ")[0] == f" {out}"


def test_what_train_says_in_the_end_can_be_typed(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = dataclasses.replace(SMALL, folder=str(runs / "bytes"), sharding="zero1", dtype="bfloat16")
    launch.run(train.train, (settings,))  # it is finished
    (command,) = re.findall(r"^try it +(.*)$", capfd.readouterr().out, re.MULTILINE)
    _, *words = shlex.split(command)
    assert worlds.finish(*words).code == 0


def test_each_token_is_drawn_from_what_the_model_expects_after_those_that_it_sees(runs: Path) -> None:
    model, notes = generate.load(runs / "bytes" / "step-000004", "cpu")
    assert notes["step"] == 4
    prompt = torch.tensor(list(b"Down, down, down. There was nothing"))  # longer than the context
    found = torch.cat([prompt, generate.generate(model, prompt, 20, 0.0, 0)])
    for end in range(len(prompt), len(found)):
        assert found[end] == model(found[None, end - SMALL.context : end])[0, -1].argmax()
    wild = generate.generate(model, prompt, 400, 100.0, 0)
    assert len(wild.unique()) > 150  # at this temperature all bytes are nearly alike
    assert len(generate.generate(model, prompt, 400, 0.3, 0).unique()) < 60


@pytest.mark.parametrize(
    ("run", "words", "says"),
    [
        (
            "letters",
            "--prompt Hello",
            "--prompt 'Hello': the text that the model was trained on contains no 'H'; write",
        ),
        ("bytes", "--prompt=", "--prompt '': give at least one character, or leave it out."),
        ("bytes", "--temperature -1", "--temperature -1: must be from 0 to 100."),
        ("bytes", "--device tpu", "--device tpu is unknown; choose cpu or cuda."),
        ("nowhere", "", "nowhere: there is no such folder; name the --folder of a run of train.py"),
        ("", "", "there is no checkpoint in it; name the --folder of a run of train.py"),
    ],
)
def test_what_cannot_be_is_one_sentence(runs: Path, run: str, words: str, says: str) -> None:
    ending = worlds.answer(GENERATE, str(runs / run), *words.split())
    assert (ending.code, ending.out) == (2, "")
    assert re.fullmatch(r"error: .*\.\n", ending.err)
    assert says in ending.err


def test_what_is_damaged_or_of_another_program_is_refused(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "bytes" / "step-000004", damaged := tmp_path / "damaged")
    largest = max(damaged.iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    checkpoint.save(tmp_path / "other", torch.nn.Linear(2, 2))
    for folder, says in (
        (damaged, "take another checkpoint."),
        (tmp_path / "other", "is no checkpoint of train.py; name"),
    ):
        ending = worlds.answer(GENERATE, str(folder))
        assert (ending.code, ending.out) == (2, "")
        assert says in ending.err
