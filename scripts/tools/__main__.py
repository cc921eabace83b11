"""The tools' one door: `python scripts/tools NAME [arguments]`; without a name, the list of them."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def tools() -> dict[str, str]:
    """Return name -> first line of the docstring, of every module here that has a `main`."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(HERE.glob("[!_]*.py"))}
    return {
        name: (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        for name, text in texts.items()
        if "\ndef main(" in text
    }


def main() -> None:
    name, *arguments = sys.argv[1:] or [""]
    if name not in tools():
        wrong = bool(name) and name not in ("-h", "--help")
        lines = [f"error: there is no tool {name}; these are here:" if wrong else __doc__ or ""]
        lines += [f"  {tool:15s}{purpose}" for tool, purpose in tools().items()]
        print("\n".join(lines), file=sys.stderr if wrong else sys.stdout)
        sys.exit(2 if wrong else 0)
    sys.path[0] = str(HERE.parent)  # as for a worker: both packages, and this one
    sys.argv = [f"{sys.argv[0]} {name}", *arguments]  # as --help shows it, and as a results file remembers it

    from distmuon import launch

    launch.command(importlib.import_module(f"tools.{name}").main)


if __name__ == "__main__":
    main()
