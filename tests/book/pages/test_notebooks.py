"""The chapters: built alike, showing what their code really prints, and running where git alone can fetch the rest."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chapter_rules
import chapters
import nbformat
import pytest
import torch
from chapters import CHAPTERS, PICTURE, ROOT
from nbformat import NotebookNode

from muonbook import jobs
from tools import run_in_colab, run_notebooks, set_address

by_name = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A notebook that prints, runs a command, draws and writes a file, with its outputs stored."""
    path = tmp_path_factory.mktemp("tiny") / "00_tiny.ipynb"
    program = "import sys; print('The answer is', {value}); print('aside', file=sys.stderr)"
    run = f'value = 6 * 7\n!python -c "{program}"'
    here = f"print('{jobs.HERE}it is so.'); print('yes')"
    return chapters.tiny_notebook(path, run, "%%writefile my_00.py\nmine = 1", PICTURE, "6 * 7", here, here)


# ---- The chapters -----------------------------------------------------------------------------------------


@by_name
def test_a_chapter_is_built_like_the_others(path: Path) -> None:
    assert chapter_rules.faults(nbformat.read(path, as_version=4), path.stem) == []


@by_name
def test_a_chapter_is_stored_as_make_notebooks_stores_it(path: Path) -> None:
    chapter = nbformat.read(path, as_version=4)
    nbformat.validate(chapter)
    run_notebooks.normalize(chapter)
    assert path.read_text(encoding="utf-8") == nbformat.writes(chapter, version=4) + "\n"


@pytest.mark.timeout(3600)
@by_name
def test_a_chapter_prints_in_colab_what_it_shows(path: Path, published: str, tmp_path: Path) -> None:
    assert run_in_colab.in_colab(path, published, tmp_path / "reader") == []


# ---- The first cell ---------------------------------------------------------------------------------------

CELL = run_notebooks.first_cell(run_in_colab.READERS.url, "07_virtual_map")


def small_project(folder: Path) -> Path:
    """Make as much of the project as the first cell looks for, which says where it was started."""
    for name in ("scripts/distmuon/__init__.py", "scripts/muonbook/__init__.py", "notebooks/.keep"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    start = "import os\n\ndef start(chapter):\n    print(os.getcwd(), __file__, chapter)\n"
    (folder / "scripts" / "muonbook" / "notebook.py").write_text(start)
    return folder


def run_first_cell(
    folder: Path, source: str = run_in_colab.NOWHERE, cell: str = CELL, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run the first cell in `folder`, where git finds the project at `source`."""
    (home := folder.parent / "home").mkdir(exist_ok=True)
    environment = run_in_colab.reader(home, source, colab=False) | changes
    return subprocess.run([sys.executable, "-c", cell], cwd=folder, env=environment, capture_output=True, text=True)


def started_in(project: Path) -> tuple[int, str, str]:
    return 0, f"{project}/notebooks {project}/scripts/muonbook/notebook.py 07_virtual_map\n", ""


def ended(done: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("where", [".", "notebooks", "beside"])
def test_the_first_cell_takes_the_clone_that_it_stands_in_or_beside(tmp_path: Path, where: str) -> None:
    project = small_project(tmp_path / "content" / "muon-at-scale")
    small_project(project / "muon-at-scale")  # a second copy, as cells run from the root have left it
    folder = tmp_path / "content" if where == "beside" else project / where
    assert ended(run_first_cell(folder)) == started_in(project)


def test_the_first_cell_fetches_once_the_branch_that_its_notebook_follows(tmp_path: Path) -> None:
    source = small_project(tmp_path / "source")
    run_in_colab._git("init", "--quiet", "--initial-branch=published", ".", folder=source)
    run_in_colab._git("add", "--all", ".", folder=source)
    run_in_colab._git("commit", "--quiet", "--message=What the pages show", folder=source)
    run_in_colab._git("switch", "--quiet", "--create=main", folder=source)
    (source / "scripts" / "muonbook" / "notebook.py").write_text("what has come since\n")
    run_in_colab._git("commit", "--quiet", "--all", "--message=Later", folder=source)
    (content := tmp_path / "content").mkdir()
    cell = run_notebooks.first_cell(run_in_colab.READERS.url, "07_virtual_map", "published")
    for address in (source.as_uri(), run_in_colab.NOWHERE):
        assert ended(run_first_cell(content, address, cell)) == started_in(content / "muon-at-scale")


def test_notebooks_that_follow_a_branch_fetch_it_and_are_opened_from_it(tmp_path: Path) -> None:
    (copies := tmp_path / "notebooks").mkdir()
    for path in CHAPTERS[:2]:
        shutil.copyfile(path, copies / path.name)
    page = "[Try it]({link}), [elsewhere](https://github.com/a/b/blob/main/notebooks/x.ipynb)\n"
    (prose := tmp_path / "book" / "puzzles.md").parent.mkdir()
    prose.write_text(page.format(link=chapters.HERE.colab("notebooks/x.ipynb")))
    command = [sys.executable, str(ROOT / "scripts" / "tools"), "follow_branch", "--folder", str(tmp_path)]
    done = subprocess.run([*command, "published"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 notebooks follow the branch published.\n", "")
    assert prose.read_text() == page.format(link=chapters.HERE.colab("notebooks/x.ipynb", "published"))
    for path in CHAPTERS[:2]:
        before, after = (nbformat.read(folder / path.name, as_version=4) for folder in (path.parent, copies))
        nbformat.validate(after)
        link = chapters.HERE.colab(f"notebooks/{path.name}", "published")
        assert f"[Open in Colab]({link})" in after.cells[0].source
        assert chapters.HERE.colab("notebooks/") not in "".join(cell.source for cell in after.cells)
        (first, *code) = (cell for cell in after.cells if cell.cell_type == "code")
        assert first.source == run_notebooks.first_cell(chapters.HERE.url, path.stem, "published")
        was = [cell for cell in before.cells if cell.cell_type == "code"]
        assert [cell.outputs for cell in (first, *code)] == [cell.outputs for cell in was]
        assert [cell.source for cell in code] == [cell.source for cell in was[1:]]
    assert subprocess.run([*command, "main"], capture_output=True).returncode == 0
    assert [(copies / path.name).read_bytes() == path.read_bytes() for path in CHAPTERS[:2]] == [True, True]

    done = subprocess.run([*command, "two words"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: 'two words' is no name of a branch; name one such as published.\n"


@pytest.mark.parametrize(
    ("cell", "path", "says"),
    [
        (
            run_notebooks.first_cell(set_address.NOWHERE.url, "07_virtual_map"),
            None,
            "This project is not published yet, so nothing is fetched; open this notebook in the folder notebooks of a "
            r"copy that you have\.",
        ),
        (CELL, None, r"The project could not be fetched \(fatal: .*\); mend that, and try again\."),
        (CELL, "/nowhere", r"The project could not be fetched \(.*'git'\); mend that, and try again\."),
    ],
    ids=["an address that is a placeholder", "no network", "no git"],
)
def test_a_first_cell_that_can_fetch_nothing_says_so_in_a_sentence_and_leaves_nothing(
    cell: str, path: str | None, says: str, tmp_path: Path
) -> None:
    (content := tmp_path / "content").mkdir()
    done = run_first_cell(content, cell=cell, **({"PATH": path} if path else {}))
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(f"{says}\n", done.stderr), done.stderr
    assert list(content.iterdir()) == []


@pytest.mark.parametrize("broken", ["nothing is in it", "its files are not all there"])
def test_a_clone_that_was_broken_off_is_named_and_neither_used_nor_touched(broken: str, tmp_path: Path) -> None:
    clone = tmp_path / "content" / "muon-at-scale"
    if broken == "nothing is in it":
        clone.mkdir(parents=True)
    else:
        (small_project(clone) / ".git").mkdir()
    before = sorted(clone.rglob("*"))
    assert ended(run_first_cell(clone.parent)) == (
        1,
        "",
        f"In {clone} there is an unfinished copy of the project; remove that folder, and run this cell again.\n",
    )
    assert sorted(clone.rglob("*")) == before


# ---- A reader's machine -----------------------------------------------------------------------------------


def test_the_comparison_bites_on_all_but_lines_about_the_machine(tiny: Path, published: str, tmp_path: Path) -> None:
    stored = json.loads(tiny.read_text(encoding="utf-8"))
    first, run, write, draw, value, here, there = (cell for cell in stored["cells"] if cell["cell_type"] == "code")
    assert first["outputs"][0]["text"][0].startswith(f"{jobs.READY}torch {torch.__version__.partition('+')[0]}, ")
    first["outputs"][0]["text"] = [f"{jobs.READY}torch 9.9.9, 64 cores; this chapter's runs take about 3 minutes.\n"]
    here["outputs"][0]["text"] = [f"{jobs.HERE}it is not.\n", "yes\n"]
    there["outputs"][0]["text"] = [f"{jobs.HERE}it is so.\n", "no\n"]
    run["outputs"][0]["text"][0] = "The answer is 43\n"
    draw["outputs"][0]["data"]["text/plain"] = ["A line that rises from 0 to 4."]
    value["outputs"][0]["data"]["text/plain"] = ["43"]
    write["execution_count"] = None
    (tmp_path / tiny.name).write_text(json.dumps(stored), encoding="utf-8")
    found = run_in_colab.in_colab(tmp_path / tiny.name, published, tmp_path / "reader")
    says = ("mismatch", "Unrun reference cell", *3 * ["mismatch"], "7 code cells, 6 with stored outputs")
    for fault, words in zip(found, says, strict=True):
        assert words in fault


def test_the_shared_cell_can_be_run_twice(published: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    script = (
        f"cell = {CELL!r}\nexec(cell)\nplace, path = os.getcwd(), os.environ['PATH']\nexec(cell)\n"
        "assert (os.getcwd(), os.environ['PATH']) == (place, path)\nos.chdir('../..')\nexec(cell)\n"
        "assert os.getcwd() == place, 'a restarted kernel begins where it began'\nprint(os.path.relpath(place, begun))"
    )
    environment = run_in_colab.reader(home, published, colab=True)
    done = subprocess.run(
        [sys.executable, "-c", f"begun = {str(home)!r}\n{script}"],
        cwd=home, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    *ready, where = done.stdout.splitlines()
    assert (done.returncode, where) == (0, "muon-at-scale/notebooks"), done.stderr
    assert ready == 3 * [ready[0]]


# ---- The rules ---------------------------------------------------------------------------------------------

LONG = 101 * "x"


def _replace(cell: int, old: str, new: str) -> Callable[[NotebookNode], None]:
    """Return what replaces a text in the source of one cell of `good_chapter`."""

    def spoil(chapter: NotebookNode) -> None:
        assert old in chapter.cells[cell].source
        chapter.cells[cell].source = chapter.cells[cell].source.replace(old, new, 1)

    return spoil


def _print(text: str) -> Callable[[NotebookNode], None]:
    return lambda chapter: chapter.cells[2].outputs[0].update(text=text)


def _update(cell: int, **changes: Any) -> Callable[[NotebookNode], None]:
    return lambda chapter: chapter.cells[cell].update(changes)


def good_chapter() -> NotebookNode:
    """A chapter without a fault; its cells: prose, the shared one, the worker with its lines, a figure, a listing."""
    headings = [f"## {name}" for name in chapter_rules.HEADINGS]
    headings[0] += "\n<details><summary>Answer</summary>Yes: $a_{i}$, `{x}`.</details>"
    link = f"[Open in Colab]({chapters.HERE.colab('notebooks/07_virtual_map.ipynb')})"
    run = nbformat.v4.new_output("stream", text="4 ranks, 3 steps, 1/2 of DP / TP.\n")
    alt = {"image/png": "AAAA", "text/plain": "Four shards in a row, then padding."}
    drawn = nbformat.v4.new_output("display_data", data=alt)
    sources: tuple[tuple[str, list[NotebookNode], list[str]], ...] = (
        ("!python ../scripts/07_virtual_map.py --dp 4", [run], []),
        ("# Drawing: a row of shards\nnotebook.picture(figure, alt)", [drawn], ["hide-input"]),
        ("from muonbook import x\n\nnotebook.source(x.y)", [], ["remove-input"]),
    )
    cells = [
        nbformat.v4.new_markdown_cell("\n\n".join(["# A title", link, *headings])),
        chapters.ran_first_cell("07_virtual_map"),
    ]
    for count, (source, outputs, tags) in enumerate(sources, 2):
        metadata = {"tags": tags} if tags else {}
        cells.append(nbformat.v4.new_code_cell(source, execution_count=count, outputs=outputs, metadata=metadata))
    return nbformat.v4.new_notebook(cells=cells)


def test_a_good_chapter_has_no_faults_and_what_varies_may_be_printed_under_a_tag() -> None:
    assert chapter_rules.faults(good_chapter(), "07_virtual_map") == []
    chapter = good_chapter()
    _print("took 3.1 s")(chapter)
    _update(2, metadata={"tags": [chapter_rules.IGNORED]})(chapter)
    assert chapter_rules.faults(chapter, "07_virtual_map") == []


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_replace(0, "07_virtual_map", "08_muon_over_dp"), "no link"),
        (_replace(0, "## Puzzle\n", ""), "its sections are"),
        (_replace(0, "<details>", ""), "not closed"),
        (_replace(0, "# A title", "# A title with a {term}`bucket`"), "a role of MyST"),
        (_replace(1, "--depth=1", "--depth=2"), "not the shared one"),
        (_replace(2, "07_virtual_map", "10_dp_tp"), "never runs its own worker"),
        (_replace(2, "--dp 4", "--check my_07.py"), "checker did not answer"),
        (_replace(2, "!python", "# NBVAL_IGNORE_OUTPUT\n!python"), "a comment excuses a cell"),
        (_replace(2, "!python", "notebook.moving('row', frames)\n!python"), "draws is not tagged hide-input"),
        (_replace(4, "notebook.source", "print(1)\nnotebook.source"), "does more than show sources and is tagged"),
        (_replace(0, "## Takeaways", f"```python\n{LONG}\n```\n## Takeaways"), "a line of 101 characters"),
        (_print("50%\r100%"), "a carriage return"),
        (_print("saved to /tmp/x/figure.png"), "a path"),
        (_print("UserWarning: old"), "a warning"),
        (_print("rank 0 has PID 1234"), "a process id"),
        (_print("in 3 seconds"), "a time"),
        (_print(LONG), "a line of 101 characters, more than 100"),
        (_update(2, execution_count=None), "its cells were not run in order"),
        (_update(3, metadata={"tags": ["hide-input", "nbval-skip"]}), "a cell is excused from running"),
        (_update(3, outputs=[nbformat.v4.new_output("error", ename="KeyError")]), "a cell raised KeyError"),
    ],
)
def test_the_rules_bite(spoil: Callable[[NotebookNode], None], says: str) -> None:
    chapter = good_chapter()
    spoil(chapter)
    assert says in "\n".join(chapter_rules.faults(chapter, "07_virtual_map"))


# ---- make notebooks ---------------------------------------------------------------------------------------


def test_running_a_notebook_again_gives_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / tiny.name
    path.write_bytes(tiny.read_bytes())
    line = run_notebooks.regenerate(path)
    assert re.fullmatch(r"00_tiny: \d+ s, 7 code cells, 1 runs of workers, 1 figures", line)
    assert path.read_bytes() == tiny.read_bytes()
    assert [child.name for child in tmp_path.iterdir()] == [tiny.name], "nothing that a cell writes lands here"


def test_a_chapter_that_fails_is_named_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "00_fails.ipynb"
    notebook = nbformat.v4.new_notebook()
    cells = (chapters.first_cell("00_fails"), "!echo what went wrong; exit 4", "print('never')")
    notebook.cells = list(map(nbformat.v4.new_code_cell, cells))
    path.write_text(nbformat.writes(notebook), encoding="utf-8")
    before = path.read_bytes()
    command = [sys.executable, str(ROOT / "scripts" / "tools"), "run_notebooks", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: 00_fails: ")
    for part in ("what went wrong", "WorkerFailed", "ended with exit code 4", "The file was left as it was."):
        assert part in done.stderr
    assert "\x1b" not in done.stderr
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]

    done = subprocess.run([*command, "07"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: there is no chapter 07; there are 00_fails.\n"


def test_chapters_are_chosen_by_how_their_names_begin(tmp_path: Path) -> None:
    for name in ("02_b", "10_c", "01_a", "notes", "03_d"):
        (tmp_path / f"{name}.ipynb").touch()

    def chosen(*names: str) -> list[str]:
        return [path.stem for path in run_notebooks.chapters(tmp_path, list(names))]

    assert chosen() == ["01_a", "02_b", "03_d", "10_c"]
    assert chosen("10", "02_b", "notebooks/01_a.ipynb") == ["01_a", "02_b", "10_c"]


@pytest.mark.parametrize("url", ["https://github.com/some-one/book", "https://huggingface.co/spaces/some-one/book"])
def test_cells_keep_their_ids_under_any_address(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = set_address.parse(url)
    chapter = nbformat.read(CHAPTERS[0], as_version=4)
    before = [cell.id for cell in chapter.cells]
    for cell in chapter.cells:
        cell.source, _ = set_address.rewrite(cell.source, chapters.HERE, there)
    assert [cell.source for cell in chapter.cells if there.url in cell.source], "an address was set"
    monkeypatch.setattr(set_address, "current", lambda root: there)
    run_notebooks.normalize(chapter)
    assert [cell.id for cell in chapter.cells] == before


def test_cells_keep_their_ids_when_one_is_inserted_before_them() -> None:
    def ids(*sources: str) -> list[str]:
        chapter = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, sources)))
        run_notebooks.normalize(chapter)
        return [cell.id for cell in chapter.cells]

    assert ids("1", "2") == ids("1", "2") == [ids("1", "0", "2")[0], ids("1", "0", "2")[2]]


@pytest.mark.parametrize("argument", ["", '"06_zero1"'])
def test_the_shared_first_cell_is_written_over_an_older_one_alone(argument: str) -> None:
    older = nbformat.v4.new_code_cell(f"from distmuon import notebook\nnotebook.start({argument})\n")
    chapter = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell("# T"), older, nbformat.v4.new_code_cell("1")]
    )
    run_notebooks.share_first_cell(chapter, "05_x", chapters.HERE.url)
    assert [cell.source for cell in chapter.cells] == ["# T", chapters.first_cell("05_x"), "1"]
    other = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")])
    run_notebooks.share_first_cell(other, "05_x", chapters.HERE.url)
    assert other.cells[0].source == "1"


def test_normalizing_keeps_what_authors_write_and_drops_the_rest() -> None:
    chapter = nbformat.v4.new_notebook(metadata={"widgets": {"state": {}}, "colab": {"provenance": []}})
    chapter.cells = [nbformat.v4.new_markdown_cell("# T"), *(nbformat.v4.new_code_cell("1") for _ in range(3))]
    chapter.cells[1].update(id="any", execution_count=9)
    chapter.cells[1].outputs = [nbformat.v4.new_output("stream", text="10%\r20%\r\ndone\r\n")]
    chapter.cells[1].metadata.update(tags=["hide-input"], execution={"iopub.status.busy": "now"}, scrolled=True)
    chapter.cells[2].id = "any"
    del chapter.cells[3]["id"]
    run_notebooks.normalize(chapter)
    assert dict(chapter.metadata) == run_notebooks.METADATA
    name = chapter.cells[1].id
    assert [cell.id for cell in chapter.cells[1:]] == [name, f"{name}-2", f"{name}-3"]
    assert [cell.execution_count for cell in chapter.cells[1:]] == [1, 2, 3]
    assert chapter.cells[1].outputs[0].text == "20%\ndone\n"
    folded = {"tags": ["hide-input"], "cellView": "form", "jupyter": {"source_hidden": True}}  # in Colab, in Jupyter
    assert [cell.metadata for cell in chapter.cells] == [{}, folded, {}, {}]
    nbformat.validate(chapter)
