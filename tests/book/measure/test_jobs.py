"""Results are files that every reader of JSON takes, and are not lost where the disk is full."""

import json
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distmuon import launch
from muonbook import jobs
from muonbook.ch01 import experiments
from muonbook.measure import results, trace

full_disk = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
DIVERGED = {"losses": [2.5, math.inf], "gap": -math.inf, "runs": ({"loss": math.nan, "rate": None},), "name": "muon"}


def strictly(text: str) -> Any:
    """Return what the text holds, read as JavaScript and most others read it."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_training_that_diverged_is_stored_as_json_and_read_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    results.write(tmp_path / "race.json", DIVERGED)
    stored = strictly((tmp_path / "race.json").read_text())
    assert (stored["losses"], stored["gap"]) == ([2.5, "Infinity"], "-Infinity")
    assert stored["runs"] == [{"loss": "NaN", "rate": None}]
    found = results.load("race")
    assert (found["losses"], found["gap"], found["name"]) == ([2.5, math.inf], -math.inf, "muon")
    assert math.isnan(found["runs"][0]["loss"])


def test_finite_numbers_are_written_as_they_are() -> None:
    plain = {"a": [1, 2.5, None, True, "x – y"], "b": {"c": 1e-300}}
    assert jobs.to_json(plain, indent=1) == json.dumps(plain, indent=1, ensure_ascii=False)
    assert jobs.from_json(jobs.to_json(plain)) == plain


@full_disk
@pytest.mark.parametrize("kind", [".json", ".json.gz", ".npz"])
def test_what_a_full_disk_does_not_take_is_kept_elsewhere_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    full = tmp_path / f"full{kind}"
    full.symlink_to("/dev/full")
    run = {"matrices": {"gradient": torch.ones(2)}, "after": {"gradient": [1.0]}, "before": [2.0]}
    saved = {
        ".json": lambda: jobs.write_json(full, {"losses": [1.0]}),
        ".json.gz": lambda: trace.save({"traceEvents": []}, full),
        ".npz": lambda: experiments.save(str(full), [run]),
    }
    with pytest.raises(launch.OutputError) as told:
        saved[kind]()
    option = {".json": "--json", ".json.gz": "--traces", ".npz": "--save"}[kind]
    said = re.fullmatch(
        rf"{option} {full}: cannot be written \(No space left on device\); what it was to hold is in (\S+)\.",
        str(told.value),
    )
    assert said
    if kind == ".json":
        assert json.loads(Path(said[1]).read_text()) == {"losses": [1.0]}
    elif kind == ".npz":
        assert np.load(said[1])["gradient"].tolist() == [1.0, 1.0]


@full_disk
def test_where_no_disk_has_room_that_is_said_and_the_exit_code_is_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit) as left:
        launch.command(lambda: jobs.write_json("/dev/full", {}))
    assert left.value.code == 1
    assert capsys.readouterr().err == (
        "error: --json /dev/full: cannot be written (No space left on device); "
        "there is no room for a temporary file either.\n"
    )
