"""The matrices in a parameter: one, or several, and whether a cut over TP goes through them or between them.

    "whole"                   [m, n]             one
    "stacked"                 [E, m, n]          E: the experts of a mixture
    "flattened"               [out, in, kh, kw]  one, [out, in kh kw]: the kernel of a convolution
    ("rows", n)               [n m, k]           n, one below the other: heads of a query, key or value
    ("columns", n)            [m, n k]           n, side by side: heads of an output projection
    ("fused", (q, k, v))      [q + k + v, d]     one of q rows, one of k, one of v
    ("fused", ((q, 8), ...))  [q + ..., d]       the q rows in 8 heads, ...

These are the values of the option `matrices`. Numbers are those of the whole parameter. Where TP cuts a fused one
along dimension 0, it cuts each part by itself: a rank holds [q_tp; k_tp; v_tp], and the q_tp of all ranks make q.
Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Matrices = str | tuple[str, Any]

NAMED = ("whole", "stacked", "flattened")
NUMBERED = {"rows": 0, "columns": 1}  # the dimension along which n matrices follow each other


class MatrixBlock(NamedTuple):
    """Matrices of one shape in a parameter. rows: how much of the parameter's dimension 0 they take."""

    rows: int
    number: int
    shape: tuple[int, int]


class MatrixLayout(NamedTuple):
    """How a tensor falls into matrices. blocks: of how many TP blocks it was put together along dimension 0."""

    matrices: Matrices = "whole"
    blocks: int = 1


def kind_of(matrices: Matrices) -> str:
    """Return the first word of the option."""
    return str(_read(matrices)[0])


def check_matrices(matrices: Any) -> None:
    """Raise ValueError, naming what there is, for a value that the option `matrices` cannot have."""
    kind, given = _read(matrices)
    if kind in NAMED and given is None:
        return
    if kind in NUMBERED and _is_count(given):
        return
    if kind == "fused" and isinstance(given, Sequence) and given and all(map(_is_entry, given)):
        return
    raise ValueError(
        f"matrices is {matrices!r}; give 'whole', 'stacked', 'flattened', ('rows', n), ('columns', n) with n of 1 or "
        "more, or ('fused', (q, k, v)) with numbers of rows, each of which may be (rows, heads) where heads divides it."
    )


def parts(matrices: Matrices, shape: Sequence[int]) -> list[MatrixBlock]:
    """Return the matrices in a parameter of this shape, whole or TP-local, with numbers that mean the same."""
    kind, given = _read(matrices)
    a, b = shape[0], math.prod(shape[1:])
    if kind == "stacked":
        return [MatrixBlock(a, a, (shape[1], shape[2]))]
    if kind == "rows":
        return [MatrixBlock(a, given, (a // given, b))]
    if kind == "columns":
        return [MatrixBlock(a, given, (a, b // given))]
    if kind == "fused":
        return [MatrixBlock(rows, heads, (rows // heads, b)) for rows, heads in map(_rows_and_heads, given)]
    return [MatrixBlock(a, 1, (a, b))]


def rows_in(matrices: Matrices, shape: Sequence[int]) -> int:
    """Return how many rows all the matrices in a parameter of this shape have together."""
    return sum(part.number * part.shape[0] for part in parts(matrices, shape))


def is_tp_aligned(matrices: Matrices, dim: int) -> bool:
    """Say whether a cut over TP along `dim` goes between the matrices, so that every rank holds whole ones."""
    kind, given = _read(matrices)
    if kind == "fused":
        return dim == 0 and not any(isinstance(entry, int) for entry in given)
    return dim == {"stacked": 0, **NUMBERED}.get(kind)


def globalize(matrices: Matrices, dim: int | None, tp: int) -> Matrices:
    """Return what the option says of the whole parameter, from what it says of one of `tp` blocks cut along `dim`."""
    return _changed(matrices, dim, lambda number: number * tp)


def localize(matrices: Matrices, name: str, shape: Sequence[int], dim: int | None, tp: int) -> Matrices:
    """Return what the option says of a TP-local block: the opposite of `globalize`.

    name, shape, dim, tp: of the parameter: its name, TP-local shape, tp_split_dim and T.
    Raises ValueError, naming parameter, value and remedy, where they do not go together.
    """
    check_matrices(matrices)
    whole = tuple(n * tp if at == dim else n for at, n in enumerate(shape))
    if problem := _problem(matrices, whole) or _cut_problem(matrices, dim, tp):
        raise ValueError(f"parameter {name!r} of shape {whole} has matrices={matrices!r}; {problem}.")
    return _changed(matrices, dim, lambda number: number // tp)


def _problem(matrices: Matrices, shape: tuple[int, ...]) -> str:
    kind, given = _read(matrices)
    if kind == "whole" and len(shape) > 2:
        return (
            "that is for an [m, n]; give its group 'stacked' for the experts of an [E, m, n], 'flattened' for a "
            "convolution's kernel, or put it in an AdamW group; split_parameters(model) and MuonW(model) know which"
        )
    if kind == "stacked" and len(shape) != 3:
        return "that is for [E, m, n]; give its group 'flattened' for a kernel, 'whole' for an [m, n]"
    if kind == "flattened" and len(shape) < 3:
        return "that is for kernels of 3 dimensions or more; give its group 'whole'"
    if kind in NAMED:
        return ""
    if len(shape) != 2:
        return "that is for parameters of 2 dimensions; give its group 'stacked' or 'flattened'"
    if kind == "fused":
        total = sum(rows for rows, _ in map(_rows_and_heads, given))
        if total == shape[0]:
            return ""
        across = total == shape[1] and len({_rows_and_heads(part)[0] for part in given}) == 1
        remedy = f"the parts lie beside each other, so give ('columns', {len(given)})" if across else "list all of them"
        return f"the parts have {total} rows, the parameter {shape[0]}; {remedy}"
    size = shape[NUMBERED[kind]]
    return f"{given} does not divide its {size} {kind}; give a number that does" if size % given else ""


def _cut_problem(matrices: Matrices, dim: int | None, tp: int) -> str:
    kind, given = _read(matrices)
    if NUMBERED.get(kind, -1) == dim and given % tp:
        return f"{tp} TP ranks cannot hold {given} matrices in equal parts; choose a T that divides {given}"
    if kind == "fused" and dim == 0:
        numbers = [n for entry in given for n in ([entry] if isinstance(entry, int) else entry)]
        if uneven := [n for n in numbers if n % tp]:
            return f"{tp} TP ranks cannot hold {uneven[0]} rows or heads in equal parts; choose a T that divides it"
    return ""


def _read(matrices: Any) -> tuple[Any, Any]:
    """Return the kind and what is given with it; (None, None) for nonsense."""
    if isinstance(matrices, str):
        return matrices, None
    if isinstance(matrices, tuple | list) and len(matrices) == 2 and isinstance(matrices[0], str):
        return matrices[0], matrices[1]
    return None, None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_entry(entry: Any) -> bool:
    """Say whether this can be a part of a fused parameter: rows, or (rows, heads)."""
    if isinstance(entry, tuple | list):
        return len(entry) == 2 and all(map(_is_count, entry)) and entry[0] % entry[1] == 0
    return _is_count(entry)


def _rows_and_heads(entry: Any) -> tuple[int, int]:
    return (entry, 1) if isinstance(entry, int) else (entry[0], entry[1])


def _changed(matrices: Matrices, dim: int | None, change: Callable[[int], int]) -> Matrices:
    """Return the option for a parameter that is longer or shorter along `dim`."""
    kind, given = _read(matrices)
    if kind == "fused":
        new = change if dim == 0 else int
        return kind, tuple(new(e) if isinstance(e, int) else (new(e[0]), new(e[1])) for e in given)
    if kind in NUMBERED:
        return kind, change(given) if NUMBERED[kind] == dim else given
    return matrices
