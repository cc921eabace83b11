"""What holds the repository together: one public address, exact pins, no path of one machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import worlds

from muonbook import notebook
from tools import run_in_colab, set_address

ROOT = Path(__file__).resolve().parents[3]
ELSEWHERE = "https://github.com/some-one/muon.book-2"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = ("chromium", "iproute2")  # of the system; everything else comes from requirements.txt


@cache
def repository_texts() -> dict[Path, str]:
    """Return path (relative) -> text of every file that belongs to the project; binary files are left out."""
    texts = {}
    for path in run_in_colab.project_files(ROOT):
        try:
            texts[path] = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return texts


def make(*arguments: str, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run make as from a shell: not as a part of the `make test` that may be around us, nor with its PYTHON."""
    around = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON"}
    shell = {key: value for key, value in os.environ.items() if key not in around} | variables
    return subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True, env=shell)


# --- The public address ---


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of every file that repeats the address, and a notebook whose first cell does."""
    for path in set_address.places(ROOT):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    here = set_address.current(ROOT)
    badge = f"[Colab]({here.colab('notebooks/99_x.ipynb')})"
    (tmp_path / "notebooks").mkdir(exist_ok=True)
    (tmp_path / "notebooks" / "99_x.ipynb").write_text(
        f'{{"cells": [{{"source": ["{badge}", "!git clone --depth 1 {here.url}.git", "https://{here.pages}/x"]}}]}}\r\n',
        encoding="utf-8",
        newline="",
    )
    return tmp_path


def test_every_copy_of_the_address_equals_the_one_in_config() -> None:
    here = set_address.current(ROOT)
    ours = re.compile(
        rf"(https://(?:github\.com|huggingface\.co(?:/spaces|/datasets)?)/[\w.-]+/{re.escape(here.name)})(?![\w-])"
        r"|colab\.research\.google\.com/(?:github/|#fileId=https%3A//huggingface\.co/)(.+?)/blob/"
        r"|git clone\s.*(https://\S+)"
        r"|^repository-code: (\S+)",
        re.MULTILINE,
    )
    seen = set()
    for path in set_address.places(ROOT):
        for match in ours.finditer(path.read_text(encoding="utf-8")):
            found = next(filter(None, match.groups())).removesuffix(".git")
            assert here.url.endswith(found), f"{path}: {match[0]}"
            seen.add(path.relative_to(ROOT).as_posix())
    assert {"_config.yml", "README.md", "CITATION.cff", "book/how_to_run.md"} <= seen


def test_the_address_is_named_only_where_set_address_rewrites_it() -> None:
    here = set_address.current(ROOT)
    rewritten = {path.relative_to(ROOT) for path in set_address.places(ROOT)}
    strays = [path for path, text in repository_texts().items() if set_address.rewrite(text, here, here)[1]]
    assert set(strays) <= rewritten


HUGGING_FACE = [
    "https://huggingface.co/spaces/some-one/muon.book-2",
    "https://huggingface.co/datasets/some_one/book",
    "https://huggingface.co/me/book",
]


@pytest.mark.parametrize("url", HUGGING_FACE)
def test_an_address_on_hugging_face_is_understood(url: str) -> None:
    assert set_address.parse(url).url == url


@pytest.mark.parametrize(
    ("url", "colab", "page"),
    [
        (
            ELSEWHERE,
            "https://colab.research.google.com/github/some-one/muon.book-2/blob/main/",
            "https://some-one.github.io/muon.book-2/x",
        ),
        (
            HUGGING_FACE[0],
            "https://colab.research.google.com/#fileId=https%3A//huggingface.co/spaces/some-one/muon.book-2/blob/main/",
            f"{HUGGING_FACE[0]}/x",  # there is no place for published pages
        ),
    ],
)
def test_set_address_rewrites_every_copy_and_leaves_nothing_of_the_old_one(
    url: str, colab: str, page: str, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, before = set_address.current(tree), {path: path.read_bytes() for path in set_address.places(tree)}
    assert set_address.main([url + ".git"], tree) == 0
    told = capsys.readouterr().out
    assert ("Hugging Face runs no workflow: test with `make test`" in told) == (url != ELSEWHERE)
    changed = {"_config.yml: 1", "CITATION.cff: 1", "book/how_to_run.md: 1", "notebooks/99_x.ipynb: 3"}
    assert changed <= set(told.splitlines())
    assert set_address.current(tree).url == url
    for path in set_address.places(tree):
        text = path.read_text(encoding="utf-8")
        assert f"{old.owner}/{old.name}" not in text
        assert str(old.pages) not in text
    links = json.loads((tree / "notebooks" / "99_x.ipynb").read_text(encoding="utf-8"))["cells"][0]["source"]
    assert links == [f"[Colab]({colab}notebooks/99_x.ipynb)", f"!git clone --depth 1 {url}.git", page]
    cell = "\n".join(json.loads((tree / "notebooks" / "07_virtual_map.ipynb").read_text())["cells"][1]["source"])
    assert f'address, branch, copy = "{url}", "main", "muon-at-scale"' in cell
    assert set_address.set_address(tree, url) == [], "a second call has nothing left to do"
    set_address.set_address(tree, HUGGING_FACE[1] if url == HUGGING_FACE[0] else url)
    assert set_address.main([old.url], tree) == 0
    assert "Hugging Face" not in capsys.readouterr().out.splitlines()[-1]
    if url != ELSEWHERE:  # where the link to published pages has become one to the repository
        before = {path: content for path, content in before.items() if path.name != "99_x.ipynb"}
    assert {path: path.read_bytes() for path in before} == before, "there and back"


def test_links_to_raw_files_and_by_ssh_are_rewritten_too() -> None:
    ours, space = set_address.parse("https://github.com/me/book"), set_address.parse(HUGGING_FACE[0])
    links = [
        "https://raw.githubusercontent.com/me/book/main/x.png",
        "git@github.com:me/book.git",
        "//me.github.io/book/",
    ]
    there = [
        "https://huggingface.co/spaces/some-one/muon.book-2/resolve/main/x.png",
        "git@hf.co:spaces/some-one/muon.book-2.git",
        "//huggingface.co/spaces/some-one/muon.book-2/",
    ]
    assert set_address.rewrite("\n".join(links), ours, space) == ("\n".join(there), 3)
    assert set_address.rewrite("\n".join(there[:2]), space, ours) == ("\n".join(links[:2]), 2)


def test_set_address_leaves_other_repositories_alone() -> None:
    ours, other = set_address.parse("https://github.com/me/book"), set_address.parse(ELSEWHERE)
    text = "github.com/me/book2 github.com/me/book.old github.com/you/book //me.github.io/bookish me/book"
    assert set_address.rewrite(text, ours, other) == (text, 0)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "muon",
        "http://github.com/me/book",
        "https://example.org/me/book",
        "https://github.com/me",
        "https://github.com/me/book/tree/main",
        "https://github.com/-me/book",
        "https://github.com/me/..",
        "https://github.com/me/a b",
        "https://github.com/me/book\n",
        "https://github.com/_me_/book",
        "https://huggingface.co/me",
        "https://huggingface.co/spaces/me",
        "https://huggingface.co/datasets/me/..",
        "https://huggingface.co/datasets/me/book/tree/main",
    ],
)
def test_a_bad_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"https://github\.com/me/muon-at-scale"):
        set_address.parse(url)


def test_set_address_leaves_all_as_it_was_where_it_refuses(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in set_address.places(tree)}
    assert set_address.main(["muon"], tree) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert {path: path.read_bytes() for path in set_address.places(tree)} == before


# --- What is installed ---


def requirement_lines(file: str = "requirements.txt") -> list[str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize(
    ("file", "at_least"),
    [
        ("requirements.txt", {"torch", "numpy", "matplotlib", "scikit-learn", "tqdm", "jupyter-book", "pytest"}),
        (".ci/colab.txt", {"torch", "numpy", "matplotlib", "scikit-learn", "tqdm", "ipython", "ipykernel"}),
    ],
)
def test_every_requirement_is_an_exact_version_with_its_reason(file: str, at_least: set[str]) -> None:
    lines = requirement_lines(file)
    for line in lines:
        assert re.fullmatch(r"[\w.-]+==\d[\w.]* +# \S.*", line), line
    names = [re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines]
    assert len(names) == len(set(names)), "a package is listed twice"
    assert at_least <= set(names)


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


# --- What is in the tree ---


def test_no_file_names_a_path_of_one_machine() -> None:
    one_machine = re.compile(r"(?<![\w.}/-])/(?:(?:work|root|farm)/|(?:home|Users)/\w)")
    for path, text in repository_texts().items():
        found = one_machine.search(text)
        assert found is None, f"{path}: {text[max(0, found.start() - 20) : found.end() + 20]!r}"


def test_every_path_and_every_tool_that_is_told_of_exists() -> None:
    known = {path.stem for path in (ROOT / "scripts" / "tools").glob("[!_]*.py")}
    told = {".py", ".md", ".ipynb", ".yml", ".toml", ".cff", ""}
    missing, checked = [], 0
    exists = cache(lambda pattern: any(ROOT.glob(pattern)))
    for path, text in repository_texts().items():
        if path.suffix not in told or path.parts[0] == "tests":
            continue
        for elsewhere in ("scripts/*.egg-info", "scripts/models/moonlight.sh"):  # made by pip; slime's
            text = text.replace(elsewhere, "")
        for named in re.findall(
            r"(?<![\w./-])((?:scripts|tests|distmuon|muonbook)/[\w./*-]*[\w*])", text.replace("\\.", ".")
        ):
            place = named if named.startswith(("scripts/", "tests/")) else f"scripts/{named}"
            pattern = re.sub(r"NN_slug|NN", lambda found: "[0-9][0-9]" + "_*" * ("_" in found[0]), place)
            checked += 1
            missing += [] if exists(pattern) else [f"{path}: {named}"]
        for tool in re.findall(r"(?:python3?|PY\)) scripts/tools (\w+)", text):
            checked += 1
            missing += [] if tool in known or tool == "NAME" else [f"{path}: there is no tool {tool}"]
    assert checked > 100
    assert missing == [], "\n".join(missing)


def test_no_script_has_the_name_of_a_module() -> None:
    names = {path.stem for path in (ROOT / "scripts").iterdir()}
    assert names.isdisjoint(sys.stdlib_module_names)
    assert names.isdisjoint(line.partition("==")[0].replace("-", "_") for line in requirement_lines())


def test_make_alone_lists_every_target() -> None:
    done = make()
    assert done.returncode == 0, done.stderr
    phony = re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert phony is not None
    assert set(re.findall(r"^  make ([a-z-]+)", done.stdout, re.MULTILINE)) == set(phony[1].split())


@pytest.mark.parametrize(
    ("target", "variable", "says"),
    [
        ("setup", "PYTHON", "needs Python 3.11 or newer"),
        (
            ".venv-colab/.ready",
            "COLAB_PYTHON",
            "needs Python 3.13, 3.12 or 3.11 with its venv module (tried: none-such)",
        ),
    ],
)
def test_an_environment_without_a_python_for_it_names_the_versions_that_it_needs(
    target: str, variable: str, says: str, tmp_path: Path
) -> None:
    shutil.copyfile(ROOT / "Makefile", tmp_path / "Makefile")
    (tmp_path / "requirements.txt").touch()
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "colab.txt").touch()
    done = make(target, f"{variable}=none-such", folder=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert not list(tmp_path.glob(".venv*"))


def test_colabs_torch_is_the_oldest_that_a_chapter_takes() -> None:
    pinned = dict(line.split()[0].split("==") for line in requirement_lines(".ci/colab.txt"))
    assert tuple(numbers(pinned["torch"])[:2]) == notebook.TORCH_FLOOR


def test_continuous_integration_runs_the_readmes_test_command() -> None:
    run = ROOT / ".ci" / "run"
    assert os.access(run, os.X_OK)
    text = run.read_text(encoding="utf-8")
    assert text.rstrip().endswith("\nmake test")
    assert all(f"missing+=({package})" in text and f"apt-get install {package}" in README for package in PACKAGES)
    assert f"export {worlds.MUST_HAVE}=browser" in text
