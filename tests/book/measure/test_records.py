"""Records: every stored result can be traced to the commit that made it, and what needs no clock comes out again."""

import gzip
import json
import re
import subprocess
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from muonbook.measure import formulas, results
from tools import claims

FILES = sorted(path.name for path in results.FOLDER.glob("*.json*"))


def git(*words: str, folder: Path = results.ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)


def no_history(file: Path) -> str | None:
    """Return in a sentence why the history in which a file's commit could be is not here, or None if it is."""
    try:
        shallow = git("rev-parse", "--is-shallow-repository", folder=file.parent)
    except OSError:
        return "git is not here: nobody can say whether a commit is in the history"
    if shallow.returncode:
        return "this is no clone: there is no history that a commit could be in"
    if shallow.stdout.strip() == "true":
        return "this clone is shallow: it has not the history that a commit could be in; git fetch --unshallow"
    if not git("log", "--max-count=1", "--", ".", folder=file.parent).stdout:
        return "this clone is of something else: its history knows nothing of this folder"
    log = git("log", "--max-count=1", "--format=%H %P", "--", file.name, folder=file.parent).stdout.split()
    if len(log) == 1:  # no parent
        return "this history begins with the file, as a squashed one does: it has nothing of what was before"
    return None


def stamp(name: str) -> str | None:
    """Return the commit that a results file carries."""
    content = (results.FOLDER / name).read_bytes()
    found: str | None = json.loads(gzip.decompress(content) if name.endswith(".gz") else content).get("commit")
    return found


def malformed(commit: str | None) -> str | None:
    """Return what is wrong with a commit that a file carries, or None, whatever the history is."""
    if commit is None:
        return "it carries no commit"
    if re.fullmatch(r"[0-9a-f]{12,40}", commit) is None:
        return f"{commit}: taken in a tree that differed from the commit"
    return None


def in_history(commit: str, folder: Path = results.ROOT) -> bool:
    return git("merge-base", "--is-ancestor", commit, "HEAD", folder=folder).returncode == 0


AGAIN = "commit, and take it again: make bench"


@pytest.mark.parametrize("name", FILES)
def test_a_stored_result_carries_the_commit_that_made_it(name: str) -> None:
    wrong = malformed(stamp(name))
    assert wrong is None, f"{name}: {wrong}; {AGAIN}"


@pytest.mark.parametrize("name", FILES)
def test_that_commit_is_in_the_history_where_there_is_one(name: str) -> None:
    commit = stamp(name)
    assert commit is not None
    if why := no_history(results.FOLDER / name):
        pytest.skip(why)
    assert in_history(commit), f"{name}: {commit} is not in the history of HEAD; {AGAIN}"


def test_a_wrong_commit_is_seen() -> None:
    assert malformed("0" * 12) is None
    assert malformed("0" * 12 + "-dirty") is not None
    assert malformed(None) is not None


def test_a_commit_is_looked_up_where_the_history_goes_back_to_it_and_nowhere_else(tmp_path: Path) -> None:
    whole, early, late = tmp_path / "whole", "early.json", "late.json"
    whole.mkdir()
    assert no_history(whole / early) == "this is no clone: there is no history that a commit could be in"
    git("init", "--quiet", "--initial-branch=main", folder=whole)
    git("config", "user.name", "x", folder=whole)
    git("config", "user.email", "x@example.org", folder=whole)
    for name in (early, late):
        (whole / name).touch()
        git("add", name, folder=whole)
        git("commit", "--quiet", f"--message={name}", folder=whole)
    first = git("rev-parse", "HEAD~", folder=whole).stdout.strip()
    assert no_history(whole / late) is None
    assert no_history(whole / "not committed.json") is None
    (whole / "unpacked").mkdir()
    assert "something else" in str(no_history(whole / "unpacked" / late))
    assert in_history(first, whole)
    assert not in_history("0" * 12, whole)
    git("clone", "--quiet", "--depth=1", whole.as_uri(), str(tmp_path / "shallow"), folder=tmp_path)
    assert "is shallow" in str(no_history(tmp_path / "shallow" / late))
    git("checkout", "--quiet", "--orphan", "squashed", folder=whole)
    git("commit", "--quiet", "--message=all of it", folder=whole)
    assert not in_history(first, whole)
    assert "begins with the file" in str(no_history(whole / late))


# ---- Nothing here needs a clock, so it comes out again ------------------------------------------------------

BF16 = 1e-2  # Newton–Schulz in bf16 rounds as the processor does: two makers' differ by 3e-3


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of every number and text in nested lists and dicts."""
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(one, f"{path}.{key}")
    else:
        yield path, value


def test_the_claims_are_those_that_come_out_today() -> None:
    stored = {k: v for k, v in results.load("claims").items() if k not in ("machine", "commit", "command")}
    found = dict(leaves(json.loads(json.dumps(claims.measure()))))
    assert set(found) == {path for path, _ in leaves(stored)}
    for path, value in leaves(stored):
        rounded = path.startswith(".update_rms")
        assert found[path] == pytest.approx(value, rel=BF16 if rounded else 1e-12), path


def test_the_formulas_are_those_that_come_out_today() -> None:
    width, gradients = {"fp32": 4, "bf16": 2}, 4
    for row in results.load("bytes")["ratios"]:
        parameters, momentum = (width[dtype] for dtype in row["dtypes"].split(", momentum "))
        again = formulas.ratio("gather_all", row["dp"], row["tp"], gradients, parameters, momentum, Fraction(row["s"]))
        assert float(again) == pytest.approx(row["formula"], rel=1e-12), row
