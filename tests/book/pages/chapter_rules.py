"""What every chapter must have, and what none may show: checked on the stored file, without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import chapters
from nbformat import NotebookNode

from muonbook import jobs
from tools import run_notebooks

HEADINGS = ("Quick questions", "Puzzle", "Takeaways", "Where this stops being true", "Further reading")
IGNORED = run_notebooks.VARIES
MOST_IGNORED = 2  # cells of a chapter
SHORTEST_ALT = 20  # characters
LONGEST_LINE = 100  # characters of code or of what it prints: what the page shows whole at 1300 pixels (book.css)
FOLD, REMOVE = "hide-input", "remove-input"
LARGEST = 150_000  # bytes of a player: what a phone loads at once

NEVER_PRINTED = {
    "a carriage return": r"\r",
    "an escape code": r"\x1b",
    "a path of one machine": r"(?<![\w.:/])/[\w.-]+/[\w.-]",
    "a warning": r"Warning",
    "a process id": r"\b(?i:pid)\b",
    "a time": r"\d\s?(?:[mµn]?s|sec|seconds?|minutes?)\b",
}
MYST = {"a role": r"(?<!`)\{[\w:+-]+\}`[^`\n]+`", "a directive": r"^\s*(?::::+|```+\s*\{)", "a substitution": r"\{\{"}


def faults(chapter: NotebookNode, stem: str) -> list[str]:
    """Return one phrase for each rule that the chapter breaks. stem: its file's name, without the ending."""
    return [
        *_opening(chapter, stem),
        *_prose(chapter, stem),
        *_runs(chapter, stem),
        *_folds(chapter),
        *_widths(chapter),
        *_outputs(chapter),
    ]


def _opening(chapter: NotebookNode, stem: str) -> Iterator[str]:
    code = [cell for cell in chapter.cells if cell.cell_type == "code"]
    if not code or code[0].source != chapters.first_cell(stem):
        yield "the first code cell is not the shared one (first_cell of scripts/tools run_notebooks)"
    first = chapter.cells[0]
    if first.cell_type != "markdown" or not re.match(r"# \S", first.source):
        yield "the first cell is not Markdown that begins with `# ` and a title"
    if f"[Open in Colab]({chapters.HERE.colab(f'notebooks/{stem}.ipynb')})" not in first.source:
        yield "the first cell has no link [Open in Colab] to this very notebook"


def _prose(chapter: NotebookNode, stem: str) -> Iterator[str]:
    prose = [cell.source for cell in chapter.cells if cell.cell_type == "markdown"]
    headings = re.findall(r"^## +(.+)$", "\n".join(prose), re.MULTILINE)
    required = [name for heading in headings for name in HEADINGS if heading.startswith(name)]
    if required != list(HEADINGS):
        yield f"its sections are {required}, not {list(HEADINGS)} in this order"
    for text in prose:
        plain = re.sub(r"(?m)(`+)(?!\{).+?\1|\$\$?.+?\$\$?", "", text)
        for what, pattern in MYST.items():
            found = re.search(pattern, plain if what == "a substitution" else text, re.MULTILINE)
            if found:
                yield f"{what} of MyST, which Colab shows raw: {found[0].strip()}"
        if text.count("<details") != text.count("</details>"):
            yield f"a <details> that is not closed: {text[:40]!r}"
    questions = "\n".join(prose).partition("## Quick questions")[2].partition("\n## ")[0]
    if "<details" not in questions:
        yield "quick questions without answers folded into <details>"


def _runs(chapter: NotebookNode, stem: str) -> Iterator[str]:
    code = [cell for cell in chapter.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        yield "its cells were not run in order: `make notebooks` does that"
    lines = [line.strip() for cell in code for line in cell.source.splitlines()]
    if not any(line.split()[:2] == ["!python", f"../scripts/{stem}.py"] for line in lines):
        yield f"it never runs its own worker: !python ../scripts/{stem}.py"
    tags = [tag for cell in code for tag in cell.metadata.get("tags", [])]
    if tags.count(IGNORED) > MOST_IGNORED:
        yield f"{tags.count(IGNORED)} cells are tagged {IGNORED}, more than {MOST_IGNORED}"
    if any(tag.startswith(("nbval-skip", "raises-exception", "nbval-raises")) for tag in tags):
        yield "a cell is excused from running"
    if any(re.search(r"^\s*#\s*NBVAL_", cell.source, re.MULTILINE) for cell in code):
        yield "a comment excuses a cell from being compared; use a tag, which is counted"


def _folds(chapter: NotebookNode) -> Iterator[str]:
    """What is no reading for the reader is out of sight: cells that draw are folded, cells that only show are gone."""
    for cell in chapter.cells:
        if cell.cell_type != "code":
            continue
        tags, first = cell.metadata.get("tags", []), cell.source.partition("\n")[0]
        draws = bool(re.search(r"\bnotebook\.(picture|moving)\(", cell.source))
        if draws and FOLD not in tags:
            yield f"a cell that draws is not tagged {FOLD}: {first!r}"
        if FOLD in tags and not re.match(r"# Drawing: \S" if draws else r"# \S", first):
            yield f"a folded cell does not begin with a comment{' `# Drawing: ...`' * draws}: {first!r}"
        if only_shows(cell.source) != (REMOVE in tags):
            wrong = "does more than show sources" if REMOVE in tags else "only shows sources"
            yield f"a cell {wrong} and is{' not' * (REMOVE not in tags)} tagged {REMOVE}: {first!r}"


def only_shows(source: str) -> bool:
    """Say whether a cell consists of imports and calls of notebook.source, one at least."""
    try:
        lines = ast.parse(source).body
    except SyntaxError:  # a command after `!`, or a `%%writefile`
        return False
    calls = [
        ast.unparse(line.value.func)
        for line in lines
        if isinstance(line, ast.Expr) and isinstance(line.value, ast.Call)
    ]
    imports = sum(isinstance(line, ast.Import | ast.ImportFrom) for line in lines)
    shown = sum(call == "notebook.source" for call in calls)
    return shown > 0 and shown + imports == len(lines)


def _widths(chapter: NotebookNode) -> Iterator[str]:
    for cell in chapter.cells:
        shown = re.findall(r"^```[^\n]*\n(.*?)^```", cell.source, re.DOTALL | re.MULTILINE)
        if cell.cell_type == "code":
            shown = [] if REMOVE in cell.metadata.get("tags", []) else [cell.source]
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            shown += re.findall(r"^```[^\n]*\n(.*?)^```", data.get("text/markdown", ""), re.DOTALL | re.MULTILINE)
            shown += [data["text/plain"] if set(data) == {"text/plain"} else ""]
            shown.append(output.get("text", ""))
        for line in "\n".join(shown).splitlines():
            if len(line) > LONGEST_LINE:
                yield f"a line of {len(line)} characters, more than {LONGEST_LINE}: {line.strip()[:60]!r}"


def _outputs(chapter: NotebookNode) -> Iterator[str]:
    for cell in chapter.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                yield f"a cell raised {output.ename}"
            data = output.get("data", {})
            if "image/png" in data and len(data.get("text/plain", "").strip()) < SHORTEST_ALT:
                yield f"a figure is described in fewer than {SHORTEST_ALT} characters"
            if len(data.get("text/html", "").encode()) > LARGEST:
                yield f"a picture that moves has more than {LARGEST:,} bytes"
            text = output.get("text", "") + "".join(
                data.get(kind, "") for kind in ("text/plain", "text/markdown", "text/html")
            )
            text = re.sub(rf"(?m)^{jobs.READY}.*$", "", text)  # of the first cell, in minutes
            rules = {} if IGNORED in cell.metadata.get("tags", []) else NEVER_PRINTED
            if output.output_type != "stream":  # shown source may well name seconds and warnings
                rules = {what: rules[what] for what in rules if what in ("an escape code", "a path of one machine")}
            if "--check my_" in cell.source and not re.match(r"Solved|Not yet", text):
                yield f"the puzzle's checker did not answer: {text[:60]!r}"
            for what, pattern in rules.items():
                found = re.search(pattern, text)
                if found:
                    yield f"{what} is printed: {text[max(0, found.start() - 30) : found.end() + 20]!r}"
