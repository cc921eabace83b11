"""Show what one of scripts/examples changes in the AdamW script beside it, whole, with the changed lines marked.

    ```{example-diff} fsdp2
    ```

What is shown is the difference between the two files, which tests run, so that nobody copies it by hand.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive

EXAMPLES = Path(__file__).resolve().parents[2] / "scripts" / "examples"


def difference(name: str) -> str:
    """Return the script NAME_adamw.py with the lines marked that NAME.py lacks (-) or adds (+); not the docstrings."""
    lines = difflib.ndiff(program(f"{name}_adamw"), program(name))
    return "\n".join(line.rstrip() for line in lines if line[0] != "?")


def program(name: str) -> list[str]:
    """Return an example's lines from its first import on."""
    lines = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()
    return lines[next(place for place, line in enumerate(lines) if line.startswith(("import ", "from "))) :]


class ExampleDiff(Directive):
    required_arguments = 1
    option_spec: ClassVar[Any] = {}

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        for file in (f"{name}.py", f"{name}_adamw.py"):
            self.state.document.settings.record_dependencies.add(str(EXAMPLES / file))
        text = difference(name)
        return [nodes.literal_block(text, text, language="diff")]


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("example-diff", ExampleDiff)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
