"""The matrices in a parameter: which, on a TP rank and in the whole, and what is wrong with an option, in words."""

import math
from typing import Any

import pytest
from helpers_math import message, quick
from hypothesis import given
from hypothesis import strategies as st

from distmuon.optim.newton_schulz import flops
from distmuon.optim.strategies.owner import assign_owners, costs
from distmuon.sharding.layout import ParamSpec, Range
from distmuon.sharding.matrices import (
    MatrixBlock,
    MatrixLayout,
    check_matrices,
    globalize,
    localize,
    parts,
)
from distmuon.sharding.ownership import Owner, owners, plan_owned

HEADS = ("fused", ((8, 4), (4, 2), (4, 2)))


def spec(shape: tuple[int, ...], matrices: Any = "whole", dim: int | None = None, tp: int = 1) -> ParamSpec:
    """Return the spec of a parameter of this whole shape."""
    local = tuple(n // tp if at == dim else n for at, n in enumerate(shape))
    return ParamSpec("p", local, "float32", dim, localize(matrices, "p", local, dim, tp))


@pytest.mark.parametrize(
    ("matrices", "shape", "found"),
    [
        ("whole", (4, 6), [MatrixBlock(4, 1, (4, 6))]),
        ("stacked", (3, 4, 6), [MatrixBlock(3, 3, (4, 6))]),
        ("flattened", (8, 3, 2, 2), [MatrixBlock(8, 1, (8, 12))]),
        (("rows", 4), (8, 5), [MatrixBlock(8, 4, (2, 5))]),
        (("columns", 4), (5, 8), [MatrixBlock(5, 4, (5, 2))]),
        (
            ("fused", (8, 4, 2)),
            (14, 5),
            [MatrixBlock(8, 1, (8, 5)), MatrixBlock(4, 1, (4, 5)), MatrixBlock(2, 1, (2, 5))],
        ),
        (HEADS, (16, 5), [MatrixBlock(8, 4, (2, 5)), MatrixBlock(4, 2, (2, 5)), MatrixBlock(4, 2, (2, 5))]),
        (["fused", [8, [4, 2]]], (12, 5), [MatrixBlock(8, 1, (8, 5)), MatrixBlock(4, 2, (2, 5))]),
    ],
)
def test_an_option_says_which_matrices_are_in_a_parameter(matrices: Any, shape: Any, found: list[MatrixBlock]) -> None:
    check_matrices(matrices)
    assert parts(matrices, shape) == found
    assert sum(part.number * math.prod(part.shape) for part in found) == math.prod(shape)


@pytest.mark.parametrize(
    ("matrices", "shape", "dim", "here", "gathers"),
    [
        ("whole", (4, 6), 0, "whole", 0),
        ("whole", (4, 6), None, "whole", None),
        ("stacked", (4, 6, 8), 0, "stacked", None),
        ("stacked", (4, 6, 8), 1, "stacked", 1),
        ("flattened", (4, 6, 3, 3), 1, "flattened", 1),
        (("rows", 4), (8, 6), 0, ("rows", 2), None),
        (("rows", 4), (8, 6), 1, ("rows", 4), 1),
        (("columns", 4), (6, 8), 1, ("columns", 2), None),
        (("columns", 4), (6, 8), 0, ("columns", 4), 0),
        (("fused", (8, 4, 4)), (16, 6), 0, ("fused", (4, 2, 2)), 0),
        (("fused", (8, 4, 4)), (16, 6), 1, ("fused", (8, 4, 4)), 1),
        (HEADS, (16, 6), 0, ("fused", ((4, 2), (2, 1), (2, 1))), None),
        (("fused", ((8, 4), 4, 4)), (16, 6), 0, ("fused", ((4, 2), 2, 2)), 0),
    ],
)
def test_tp_cuts_through_matrices_or_between_them(matrices: Any, shape: Any, dim: Any, here: Any, gathers: Any) -> None:
    cut = spec(shape, matrices, dim, tp=2)
    assert cut.matrices == here
    assert cut.tp_gather_dim == gathers
    assert cut.tp_local_matrices == (dim is not None and gathers is None)
    assert globalize(here, dim, 2) == matrices
    assert cut.whole_parts(2) == parts(matrices, shape)
    assert cut.division(cut.shape, 2) == MatrixLayout(here)
    assert cut.division(shape, 2) == MatrixLayout(matrices, 2 if dim == 0 else 1) or dim is None


def test_a_part_has_its_own_run_of_elements_and_the_shape_of_its_whole_matrices() -> None:
    assert list(spec((16, 6), ("fused", (8, 4, 4)), 0, tp=2).runs(2)) == [
        (Range(0, 24), (4, 6), (8, 6)),
        (Range(24, 36), (2, 6), (4, 6)),
        (Range(36, 48), (2, 6), (4, 6)),
    ]
    assert list(spec((16, 6), ("fused", (8, 8)), 1, tp=2).runs(2)) == [
        (Range(0, 24), (8, 3), (8, 6)),
        (Range(24, 48), (8, 3), (8, 6)),
    ]
    assert list(spec((4, 6, 8), "stacked", 0, tp=2).runs(2)) == [(Range(0, 96), (6, 8), (6, 8))]
    assert list(spec((6, 8), ("columns", 4), 1, tp=2).runs(2)) == [(Range(0, 24), (6, 2), (6, 2))]


# ---- Refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "matrices",
    ["heads", "rows", None, 3, ("stacked", 2), ("rows", 0), ("rows", True), ("rows", 2.0), ("rows", (2, 2)), ("rows",),
     ("columns", -1), ("fused", 3), ("fused", ()), ("fused", (4, 0)), ("fused", ((8, 3), 4)), ("fused", "qkv")],
)  # fmt: skip
def test_what_is_no_value_of_the_option_is_refused(matrices: Any) -> None:
    with pytest.raises(ValueError, match=r"give 'whole', 'stacked', .*\('fused', \(q, k, v\)\)") as error:
        check_matrices(matrices)
    assert repr(matrices) in message(error)


@pytest.mark.parametrize(
    ("matrices", "shape", "dim", "says"),
    [
        ("whole", (3, 4, 5), None, r"'stacked' for the experts.*'flattened' for a.*AdamW"),
        ("stacked", (4, 5), None, r"for \[E, m, n\]; give its group 'flattened' for a kernel, 'whole'"),
        ("flattened", (4, 5), None, "3 dimensions or more; give its group 'whole'"),
        (("rows", 3), (8, 6), None, "3 does not divide its 8 rows; give a number that does"),
        (("columns", 4), (8, 6), None, "4 does not divide its 6 columns"),
        (("rows", 3), (12, 6), 0, "2 TP ranks cannot hold 3 matrices in equal parts; choose a T that divides 3"),
        (("fused", (8, 4)), (16, 6), None, "the parts have 12 rows, the parameter 16; list all of them"),
        (("fused", (9, 7)), (16, 6), 0, "2 TP ranks cannot hold 9 rows or heads in equal parts"),
        (("fused", ((12, 3), 4)), (16, 6), 0, "cannot hold 3 rows or heads"),
    ],
)
def test_what_does_not_fit_a_parameter_is_refused_with_a_remedy(matrices: Any, shape: Any, dim: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        spec(shape, matrices, dim, tp=1 if dim is None else 2)
    assert f"parameter 'p' of shape {shape} has matrices={matrices!r}; " in message(error)


# ---- Work and owners --------------------------------------------------------------------------------------


def test_the_cost_of_a_parameter_is_that_of_its_matrices() -> None:
    found = costs(
        [spec((4, 6, 8), "stacked", 0, 2), spec((16, 6), ("fused", (8, 4, 4)), 0, 2), spec((8, 6))], [0, 1], 2
    )
    assert found == {0: 4 * flops((6, 8)), 1: flops((8, 6)) + 2 * flops((4, 6))}


def test_what_a_row_shares_counts_on_all_of_its_ranks() -> None:
    dealt = owners({0: 8.0, 1: 3.0, 2: 3.0, 3: 2.0}, dp=2, tp=2, by_rows=[0])
    assert dealt == {0: Owner(0, None), 1: Owner(1, 0), 2: Owner(1, 1), 3: Owner(1, 0)}
    assert owners({0: 8.0, 1: 8.0}, dp=2, tp=4, by_rows=[0, 1]) == {0: Owner(0, None), 1: Owner(1, None)}


@given(
    st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 4),
)
@quick(80)
def test_no_row_is_ahead_of_another_by_more_than_one_item(items: list[tuple[int, bool]], dp: int, tp: int) -> None:
    """Were it so, the item that came last to the fullest rank would have gone to another one."""
    work = {index: float(cost) for index, (cost, _) in enumerate(items)}
    shared = {index for index, (_, by_rows) in enumerate(items) if by_rows}
    dealt, loads = owners(work, dp, tp, shared), dict.fromkeys(((d, t) for d in range(dp) for t in range(tp)), 0.0)
    for index, owner in dealt.items():
        assert (owner.tp is None) == (index in shared)
        for t in range(tp) if owner.tp is None else [owner.tp]:
            loads[owner.dp, t] += work[index] / (tp if index in shared else 1)
    each = [cost / (tp if index in shared else 1) for index, cost in work.items()]
    rows = [max(loads[d, t] for t in range(tp)) for d in range(dp)]
    assert max(rows) - min(rows) <= max(each) + 1e-9
    assert sum(loads.values()) == pytest.approx(sum(work.values()))


def test_the_map_of_whole_matrices_knows_what_a_row_shares() -> None:
    specs = [spec((8, 6, 8), "stacked", 0, 4), *[spec((6, 8), dim=0, tp=2)._replace(name=f"w{i}") for i in range(4)]]
    layout = plan_owned(specs, costs(specs, range(5), 4), 2, 4, 10**6)
    dealt = assign_owners(layout, range(5), 4)
    assert [spec.tp_local_matrices for spec in specs] == [True, False, False, False, False]
    assert dealt[0] == Owner(0, None)
    for index, owner in dealt.items():
        assert list(layout.owners(layout.buckets[0], index)) == [owner.dp]
