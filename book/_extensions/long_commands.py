r"""Colour a command after `!` that goes on over lines ending in a backslash; a strict build refuses it otherwise.

The lexer of IPython's cells takes one line after a `!` for a command. A longer command would have to stay on one line,
and the page would cut it off.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ipython_pygments_lexers import IPython3Lexer
from pygments.lexer import bygroups, using
from pygments.lexers import BashLexer
from pygments.token import Operator


class LongCommandLexer(IPython3Lexer):
    """IPython's cells, with commands of several lines."""

    tokens: ClassVar[dict[str, list[Any]]] = {
        **IPython3Lexer.tokens,
        "root": [(r"^(!)((?:.*\\\n)+.*\n)", bygroups(Operator, using(BashLexer))), *IPython3Lexer.tokens["root"]],
    }


def setup(app: Any) -> dict[str, bool]:
    """Let this lexer colour every cell."""
    app.add_lexer("ipython3", LongCommandLexer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
