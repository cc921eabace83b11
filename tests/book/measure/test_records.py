"""Records: every stored result can be traced to the commit that made it, and what needs no clock comes out again."""

import gzip
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from muonbook.measure import formulas, results
from tools import claims

FILES = sorted(path.name for path in results.FOLDER.glob("*.json*"))


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=results.ROOT, capture_output=True, text=True)


def no_history(name: str) -> str | None:
    """Return in a sentence why the history in which a file's commit could be is not here, or None if it is."""
    try:
        shallow = git("rev-parse", "--is-shallow-repository")
    except OSError:
        return "git is not here: nobody can say whether a commit is in the history"
    if shallow.returncode:
        return "this is no clone: there is no history that a commit could be in"
    if shallow.stdout.strip() == "true":
        return "this clone is shallow: it has not the history that a commit could be in; git fetch --unshallow"
    log = git("log", "--max-count=1", "--format=%H %P", "--", f"book/results/{name}").stdout.split()
    if not log:
        return "no commit has this file: it is not committed yet, or an archive lies in somebody else's clone"
    if len(log) == 1:  # a commit without a parent
        return "this history begins with the file, as a squashed one does: it has nothing of what was before"
    return None


def commit_all(folder: Path) -> None:
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all", "--allow-empty"]):
        author = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", *author, *words], cwd=folder, check=True)


def test_a_commit_is_looked_up_wherever_it_could_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in an archive, nor in one in somebody's clone, in a squashed history, or in a shallow clone of a whole."""
    (tmp_path / "book" / "results").mkdir(parents=True)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "this is no clone" in str(no_history("x.json"))
    commit_all(tmp_path)
    (tmp_path / "book" / "results" / "x.json").write_text("{}")
    assert "no commit has this file" in str(no_history("x.json"))
    commit_all(tmp_path)
    assert no_history("x.json") is None
    subprocess.run(["git", "clone", "-q", "--depth=1", tmp_path.as_uri(), str(tmp_path / "shallow")], check=True)
    monkeypatch.setattr(results, "ROOT", tmp_path / "shallow")
    assert "this clone is shallow" in str(no_history("x.json"))
    shutil.rmtree(tmp_path / "shallow" / ".git")
    commit_all(tmp_path / "shallow")
    assert "this history begins with the file" in str(no_history("x.json"))


def test_results_are_of_a_commit_from_which_no_code_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and other results may: one `make bench` writes them one after the other."""
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert results.commit() is None
    for name in ("book/results/x.json", "notebooks/01.ipynb", "README.md", "scripts/code.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    commit_all(tmp_path)
    head = results.commit()
    assert re.fullmatch(r"[0-9a-f]{12}", str(head))
    for name in ("book/results/x.json", "notebooks/01.ipynb", "README.md"):
        (tmp_path / name).write_text("changed")
        assert results.commit() == head, name
    (tmp_path / "scripts" / "code.py").write_text("changed")
    assert results.commit() == f"{head}-dirty"


def test_what_is_repeated_is_kept_as_median_and_quartiles_the_lower_one_first() -> None:
    assert results.spread([5.0, 1.0, 2.0, 4.0, 3.0]) == {"median": 3.0, "quartiles": [2.0, 4.0], "count": 5}
    assert results.spread([2.0]) == {"median": 2.0, "quartiles": [2.0, 2.0], "count": 1}


def stamp(name: str) -> str | None:
    """Return the commit that a results file carries."""
    content = (results.FOLDER / name).read_bytes()
    found: str | None = json.loads(gzip.decompress(content) if name.endswith(".gz") else content).get("commit")
    return found


AGAIN = "commit, and take it again: make bench"


@pytest.mark.parametrize("name", FILES)
def test_a_stored_result_carries_the_commit_that_made_it_and_the_history_has_it(name: str) -> None:
    commit = stamp(name)
    assert commit is not None, f"{name}: it carries no commit; {AGAIN}"
    clean = re.fullmatch(r"[0-9a-f]{12,40}", commit)
    assert clean, f"{name}: {commit}: taken in a tree that differed from the commit; {AGAIN}"
    if why := no_history(name):
        pytest.skip(why)
    known = git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0
    assert known, f"{name}: {commit} is not in the history of HEAD; {AGAIN}"


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
    found = dict(leaves(json.loads(json.dumps(claims.measure(quick=False)))))
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
