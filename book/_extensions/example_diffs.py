"""Show what one of scripts/examples changes in the AdamW script beside it: the changed lines, and the script in a fold.

    ```{example-diff} fsdp2
    ```

With `:whole:` the script stands there unfolded, with its changed lines marked. What is shown is the difference between
the two files, which tests run, so that nobody copies it by hand.
"""

from __future__ import annotations

import difflib
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive, directives

EXAMPLES = Path(__file__).resolve().parents[2] / "scripts" / "examples"


def difference(name: str) -> str:
    """Return the script NAME_adamw.py with the lines marked that NAME.py lacks (-) or adds (+); not the docstrings."""
    lines = difflib.ndiff(program(f"{name}_adamw"), program(name))
    return "\n".join(line.rstrip() for line in lines if line[0] != "?")


def changes(name: str) -> str:
    """Return the changed lines alone: run by run, with an empty line between runs, and in each what goes first."""
    runs = groupby(difference(name).splitlines(), key=lambda line: line[:1] in ("+", "-"))
    changed = ([line for line in run if line[1:].strip()] for differs, run in runs if differs)
    return "\n\n".join("\n".join(sorted(run, key=lambda line: line[0] == "+")) for run in changed if run)


def program(name: str) -> list[str]:
    """Return an example's lines from its first import on."""
    lines = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()
    return lines[next(place for place, line in enumerate(lines) if line.startswith(("import ", "from "))) :]


class ExampleDiff(Directive):
    required_arguments = 1
    option_spec: ClassVar[Any] = {"whole": directives.flag}

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        for file in (f"{name}.py", f"{name}_adamw.py"):
            self.state.document.settings.record_dependencies.add(str(EXAMPLES / file))
        whole, short = (nodes.literal_block(text, text, language="diff") for text in (difference(name), changes(name)))
        if "whole" in self.options:
            return [whole]
        opened = nodes.raw("", f"<details><summary>The whole script, {name}.py</summary>", format="html")
        return [short, opened, whole, nodes.raw("", "</details>", format="html")]


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("example-diff", ExampleDiff)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
