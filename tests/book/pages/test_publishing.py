"""How the project goes to the world: workflows, versions, and the page that says how it is made."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

import distmuon
from tools import bench

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "book" / "how_this_works.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def workflow(name: str) -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load(text(f".github/workflows/{name}.yml"))
    return loaded


def commands(job: dict[Any, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


# ---- Workflows --------------------------------------------------------------------------------------------


def git(*words: str, folder: Path) -> str:
    settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    author = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    done = subprocess.run(
        ["git", *author, *words], cwd=folder, env=os.environ | settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_pages_were_built_from_becomes_a_branch_of_its_own(tmp_path: Path) -> None:
    jobs = workflow("book")["jobs"]
    assert [name for name, job in jobs.items() if "write" in str(job.get("permissions", ""))] == ["build", "publish"]
    assert jobs["build"]["if"] == "github.event_name == 'push'", "no pull request writes to the repository"
    setup, follow, build, keep = commands(jobs["build"])
    assert (setup, build) == ("make setup PYTHON=python", "make book PYTHON=python")
    assert follow == ".venv/bin/python scripts/tools follow_branch published"

    git("init", "--quiet", "--bare", "--initial-branch=main", "origin.git", folder=tmp_path)
    git("clone", "--quiet", "origin.git", "here", folder=tmp_path)
    here = tmp_path / "here"
    for content in ("first", "second"):  # twice: the branch is replaced
        git("checkout", "--quiet", "-B", "main", folder=here)
        (here / "notebook").write_text(content)
        git("add", "--all", folder=here)
        git("commit", "--quiet", f"--message={content}", folder=here)
        git("push", "--quiet", "origin", "main", folder=here)
        main = git("rev-parse", "HEAD", folder=here)
        (here / "notebook").write_text(f"{content}, following the branch")
        environment = os.environ | {"GITHUB_SHA": main, "GIT_CONFIG_GLOBAL": os.devnull}
        done = subprocess.run(["bash", "-e", "-c", keep], cwd=here, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        origin = tmp_path / "origin.git"
        assert git("rev-parse", "published~", folder=origin) == git("rev-parse", "main", folder=origin) == main
        assert git("show", "published:notebook", folder=origin) == f"{content}, following the branch"
        git("checkout", "--quiet", "--detach", main, folder=here)


def test_a_release_waits_for_a_tag_of_its_version_and_for_the_owners_word() -> None:
    jobs = workflow("release")["jobs"]
    assert jobs["publish"]["if"] == "github.ref_type == 'tag' && vars.PUBLISH_TO_PYPI == 'true'"
    check = commands(jobs["build"])[0]
    for tag, code in ((f"v{distmuon.__version__}", 0), ("v0.0.9", 1), (distmuon.__version__, 1)):
        environment = os.environ | {"GITHUB_REF_NAME": tag}
        done = subprocess.run(["bash", "-e", "-c", check], cwd=ROOT, env=environment, capture_output=True, text=True)
        said = "" if code == 0 else f"The tag {tag} is not v{distmuon.__version__}.\n"
        assert (done.returncode, done.stdout) == (code, said)
    for named in ("PUBLISH_TO_PYPI", "`pypi`", "release.yml", "TORCH_CPU_INDEX"):
        assert named in CONTRIBUTING, "the owner's steps say what a workflow waits for"


# ---- Versions ---------------------------------------------------------------------------------------------


def test_one_version_stands_everywhere() -> None:
    version = distmuon.__version__
    assert re.findall(r"^## (\d\S*)$", text("CHANGELOG.md"), re.MULTILINE)[0] == version
    citation = yaml.safe_load(text("CITATION.cff"))
    assert citation["version"] == version
    (entry,) = re.findall(r"^@software\{.*?^\}", text("book/references.md"), re.MULTILINE | re.DOTALL)
    cited = dict(re.findall(r"(\w+) += \{+(.*?)\}+,?$", entry, re.MULTILINE))
    assert cited["version"] == version
    assert (cited["title"], cited["url"]) == (citation["title"], citation["repository-code"])
    assert cited["author"] == " and ".join(author["name"] for author in citation["authors"])
    settings = yaml.safe_load(text("_config.yml"))
    assert (cited["title"], cited["author"], cited["year"]) == (
        settings["title"],
        settings["author"],
        settings["copyright"],
    )


# ---- How this repository works ----------------------------------------------------------------------------


def test_every_room_is_on_the_map_and_every_room_of_the_map_exists() -> None:
    (tree,) = re.findall(r"^```\n(scripts/\n.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    shown, above = set(), [""] * 9
    for indent, entry in re.findall(r"^( *)([\w.]+/)", tree, re.MULTILINE):
        depth = len(indent) // 2
        above[depth] = entry
        shown.add("".join(above[: depth + 1]).removesuffix("/"))
    rooms = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "scripts").rglob("*.py")}
    assert shown - {"tests", "book", "notebooks"} == {re.sub(r"/ch\d\d\b", "/chNN", room) for room in rooms}
    for room in ("tests/engine", "tests/book", "tests/gpu", "book", "notebooks"):
        assert (ROOT / room).is_dir()


def test_the_core_can_be_read_in_one_evening() -> None:
    files = re.findall(r"^\d+\. `(scripts/distmuon/[\w/]+\.py)`", PAGE, re.MULTILINE)
    assert len(files) == 10
    assert "these ten files" in PAGE
    assert sum(len(text(file).splitlines()) for file in files) < 2800
    assert "fewer than 2,800 lines" in PAGE


def test_every_command_of_the_page_and_of_contributing_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", text("Makefile"), re.MULTILINE))
    used = set(re.findall(r"(?:^|`)make ([a-z-]+)", PAGE + CONTRIBUTING, re.MULTILINE))
    assert {"test", "setup", "bench", "notebooks"} <= used <= targets
    (names,) = re.findall(r'^make bench NAMES="(.*?)"', PAGE, re.MULTILINE)
    assert set(names.split()) <= set(bench.MEASUREMENTS)


def test_what_contributing_links_to_is_there() -> None:
    linked = re.findall(r"\]\((?!https:)([^)]+)\)", CONTRIBUTING)
    assert {"book/how_this_works.md", "CODE_OF_CONDUCT.md"} <= set(linked)
    assert [place for place in linked if not (ROOT / place).is_file()] == []
