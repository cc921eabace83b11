"""Formulas that are written once, as Python, so that tests can run what the page shows: `typeset` makes TeX of them."""

from __future__ import annotations

import ast

GREEK = {"eta": r"\eta", "lam": r"\lambda", "mu": r"\mu"}
WORDS = {"newton_schulz": "NewtonSchulz"}  # names that are words; all others of several letters are set as they are
LOW, HIGH = 1, 2  # how tightly an operator binds: a sum, anything else


def typeset(code: str) -> str:
    """Return TeX, in the part of it that matplotlib knows too, for an expression or one assignment.

    An arrow stands in place of the equals sign where a name is given a new value that depends on the old one.
    Raises ValueError for what has no notation here.
    """
    (statement,) = ast.parse(code).body
    if isinstance(statement, ast.Assign):
        (target,) = statement.targets
        names = {node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name)}
        becomes = isinstance(target, ast.Name) and target.id in names
        sign = r"\leftarrow" if becomes else "="
        return f"{_tex(target)} {sign} {_tex(statement.value)}"
    if isinstance(statement, ast.Expr):
        return _tex(statement.value)
    raise ValueError(f"{code!r} is neither an expression nor an assignment.")


def _tex(node: ast.AST, least: int = LOW) -> str:
    """Return TeX of a node, in brackets if it binds less than `least`."""
    match node:
        case ast.Name(name):
            return GREEK.get(name) or (name if len(name) == 1 else rf"\mathrm{{{WORDS.get(name, name)}}}")
        case ast.Constant(value):
            return str(value)
        case ast.Attribute(value, "mT"):
            return rf"{_tex(value, HIGH)}^\top"
        case ast.Tuple(parts):
            return "(" + r",\, ".join(map(_tex, parts)) + ")"
        case ast.Call(ast.Name(name), arguments):
            return _called(name, [_tex(one) for one in arguments])
        case ast.BinOp(left, operator, right):
            return _joined(left, operator, right, least)
    raise ValueError(f"there is no notation for {ast.unparse(node)!r}; add it to tools.pages.formula.")


def _called(name: str, arguments: list[str]) -> str:
    inside = r",\, ".join(arguments)
    if name == "sqrt":
        return rf"\sqrt{{{inside}}}"
    if name == "norm":
        return rf"\Vert {inside} \Vert_F"  # a bar would end the cell of a table
    return (r"\max" if name == "max" else _tex(ast.Name(name))) + f"({inside})"


def _joined(left: ast.expr, operator: ast.operator, right: ast.expr, least: int) -> str:
    match operator:
        case ast.Div():
            return rf"\dfrac{{{_tex(left)}}}{{{_tex(right)}}}"
        case ast.Pow():
            return f"{_tex(left, HIGH)}^{{{_tex(right)}}}"
        case ast.Mult() | ast.MatMult():
            return rf"{_tex(left, HIGH)}\,{_tex(right, HIGH)}"
        case ast.Add():
            written = f"{_tex(left)} + {_tex(right)}"
        case ast.Sub():
            written = f"{_tex(left)} - {_tex(right, HIGH)}"
        case _:
            raise ValueError(f"there is no notation for {ast.dump(operator)}; add it to tools.pages.formula.")
    return f"({written})" if least > LOW else written
