"""Ranks that hold something else are found out, on all ranks alike; other values can be mended."""

import itertools
from dataclasses import replace
from typing import Any

import consistency_workers as work
import pytest
import torch
from consistency_workers import LINES
from helpers_math import quick
from hypothesis import given
from hypothesis import strategies as st
from once import once
from torch import Tensor

from distmuon import launch
from distmuon.sharding import consistency
from distmuon.sharding.collectives import Group
from distmuon.sharding.consistency import all_equal, checksum, fingerprints
from distmuon.sharding.grid import Grid
from distmuon.verify.memory_tracker import StorageTracker

on_every_grid = pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 1)])
REMEDY = "; give every rank the same."
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@once
def facts(dp: int, tp: int) -> list[dict[str, Any]]:
    """Return what each rank of one world has found out; the world runs once, when the first test asks."""
    return launch.run(work.facts, dp=dp, tp=tp)


def alike(dp: int, tp: int, *path: str) -> Any:
    """Return what every rank has found at this place in its facts, after making sure that it is the same."""
    found: list[Any] = facts(dp, tp)
    for key in path:
        found = [ranks[key] for ranks in found]
    assert all(other == found[0] for other in found)
    return found[0]


# ---- Names, shapes, options -------------------------------------------------------------------------------

SAYS = {  # {r}: the rank that differs
    "shape": "'rows' is 3x6 float32, cut over TP along 0, muon lr=0.02 on rank {r}, "
    "and 3x5 float32, cut over TP along 0, muon lr=0.02 on rank 0",
    "lr": "'bias' is 7 float32, adamw lr=0.1 on rank {r}, and 7 float32, adamw lr=0.01 on rank 0",
    "order": "rank {r} has 'whole' in the place of 'rows'",
    "missing": "'whole' is missing on rank {r}",
    "extra": "rank {r} has 'Größe', which rank 0 has not",
    "extra at the end": "rank {r} has 'head', which rank 0 has not",
    "none at all": "'optimizer' is missing on rank {r}",
    "far more": "'rows' is missing on rank {r}",
}


@on_every_grid
def test_one_rank_with_other_lines_is_named_on_every_rank(dp: int, tp: int) -> None:
    rank = dp * tp - 1
    assert alike(dp, tp, "lines alike") is None
    for what, says in SAYS.items():
        told = f"the options of rank {rank} differ from those of rank 0: {says.format(r=rank)}{REMEDY}"
        assert alike(dp, tp, "lines", what) == told


def test_where_rank_0_differs_all_others_are_named() -> None:
    for what in SAYS:
        said = alike(2, 2, "lines on rank 0", what)
        assert said.startswith("the options of ranks 1, 2 and 3 differ from those of rank 0: ")
        assert said.endswith(REMEDY)
        assert "\n" not in said


@on_every_grid
def test_where_one_rank_fails_all_do_with_the_same_words(dp: int, tp: int) -> None:
    last = dp * tp - 1
    says = f"'setup' is ValueError: lr is -1 on rank {last}, and fine on rank 0{REMEDY}"
    assert alike(dp, tp, "outcomes", "fine") == "nothing"
    one = alike(dp, tp, "outcomes", "one fails")
    assert one == f"RankMismatchError: the outcomes of rank {last} differ from those of rank 0: {says}"
    assert alike(dp, tp, "outcomes", "all fail alike") == "ValueError: lr is -1."
    others = alike(dp, tp, "outcomes", "each fails otherwise")
    assert others.endswith(f"'setup' is ValueError: lr is -1 on rank 1, and ValueError: lr is -0 on rank 0{REMEDY}")


@on_every_grid
def test_nothing_is_recorded_and_the_ranks_stay_in_step(dp: int, tp: int) -> None:
    assert alike(dp, tp, "silent")
    assert alike(dp, tp, "total") == sum(range(dp * tp))
    assert alike(dp, tp, "ballots") == [culprits in (0, dp * tp) for culprits in range(dp * tp + 1)]


def test_ranks_bear_the_numbers_that_the_program_knows_them_by() -> None:
    outsider, first, second = (found["two of three"] for found in facts(3, 1))
    assert outsider is None
    assert first == second
    assert first["lines"].startswith("the options of rank 2 differ from those of rank 1: ")
    assert "rank 2 (DP 1, TP 0) does not hold what rank 1 (DP 0, TP 0) holds" in first["values"]


def test_one_rank_alone_agrees_with_itself() -> None:
    grid, tensors = Grid.alone(), [torch.ones(3)]
    consistency.check_same(grid, "options", LINES, "")
    consistency.check_values(grid, ["a"], tensors, [False], "")
    consistency.broadcast_values(grid, tensors, [False])
    assert torch.equal(tensors[0], torch.ones(3))


# ---- Values -----------------------------------------------------------------------------------------------


def differ(what: str, rank: str, first: str) -> str:
    return (
        f"the values of {what} differ: rank {rank} does not hold what rank {first} holds; load the same on every rank."
    )


ON_RANK_0 = "0 (DP 0, TP 0)"
WHOLE = "'whole' (whole on every TP rank)"
FOUND = {  # on 2 x 2: spoilt how -> what a check says
    "a seed for each DP rank": differ("'rows' and of 5 more", "2 (DP 1, TP 0)", ON_RANK_0),
    "a checkpoint on rank 0": differ("'rows' and of 5 more", "2 (DP 1, TP 0)", ON_RANK_0),
    "a seed for each TP rank": differ(f"{WHOLE} and of 2 more", "1 (DP 0, TP 1)", ON_RANK_0),
    "one bit": differ(WHOLE, "3 (DP 1, TP 1)", ON_RANK_0),
    "a zero's sign": differ("'scalar' (whole on every TP rank)", "3 (DP 1, TP 1)", ON_RANK_0),
}


@on_every_grid
@pytest.mark.parametrize("how", ["alike", *FOUND])
def test_other_values_are_found_and_mended(dp: int, tp: int, how: str) -> None:
    said = alike(dp, tp, "values", how, "before")
    if (dp, tp) == (2, 2):
        assert said == FOUND.get(how)
    else:  # where no seed can differ over TP
        assert (said is None) == (how in ("alike", "a seed for each TP rank"))
    assert alike(dp, tp, "values", how, "after") is None
    for rank in facts(dp, tp):
        assert all(rank["values"][how]["mended"])
        assert rank["values"][how]["untouched"]


def test_ranks_may_be_counted_along_dp_first() -> None:
    turned = {how: alike(2, 2, "turned", how) for how in FOUND}
    assert all(found["after"] is None and all(found["mended"]) for found in turned.values())
    assert turned["a seed for each DP rank"]["before"] == differ("'rows' and of 5 more", "1 (DP 1, TP 0)", ON_RANK_0)
    assert "rank 2 (DP 0, TP 1) does not hold what rank 0" in turned["a seed for each TP rank"]["before"]


def test_small_tensors_travel_together_and_a_large_one_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Tensor] = []

    def broadcast(group: Group, tensor: Tensor, label: str) -> Tensor:
        sent.append(tensor)
        return tensor

    monkeypatch.setattr(Group, "broadcast", broadcast)
    monkeypatch.setattr(consistency, "PIECE_BYTES", 1000)
    pair = Group("dp", 2, 0)
    grid = replace(Grid.alone(), dp=pair, world=pair)
    small = [torch.zeros(50, dtype=dtype) for dtype in [torch.float32, torch.bfloat16] * 8]  # 1,600 and 800 bytes
    large = torch.zeros(30, 20)
    consistency.broadcast_values(grid, [*small, large], [False] * 17)
    assert [(t.dtype, t.nbytes) for t in sent] == [
        (torch.float32, 1000),
        (torch.float32, 600),
        (torch.float32, 2400),
        (torch.bfloat16, 800),
    ]
    assert sent[2].data_ptr() == large.data_ptr()


# ---- Fingerprints -----------------------------------------------------------------------------------------


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Return any bits at all, as 1 to 6 rows of 1 to 6 numbers."""
    rows, columns, dtype = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.sampled_from(DTYPES))
    size = rows * columns * dtype.itemsize
    return torch.frombuffer(bytearray(draw(st.binary(min_size=size, max_size=size))), dtype=dtype).view(rows, columns)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def fingerprint(tensor: Tensor) -> int:
    return int(fingerprints([tensor]))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consistency, "PIECE_NUMEL", 5)


@pytest.mark.usefixtures("small_pieces")
@given(matrices(), st.data())
@quick(300)
def test_a_single_bit_changes_a_fingerprint(matrix: Tensor, data: st.DataObject) -> None:
    other = matrix.clone()
    byte, bit = data.draw(st.integers(0, matrix.nbytes - 1)), data.draw(st.integers(0, 7))
    other.view(-1).view(torch.uint8)[byte] ^= 1 << bit
    assert fingerprint(matrix.clone()) == fingerprint(matrix) != fingerprint(other)


@pytest.mark.usefixtures("small_pieces")
@given(matrices(), st.data())
@quick(300)
def test_elements_rows_and_columns_in_each_others_place_change_a_fingerprint(
    matrix: Tensor, data: st.DataObject
) -> None:
    i, j = (data.draw(st.integers(0, matrix.numel() - 1)) for _ in range(2))
    row, other_row = (data.draw(st.integers(0, matrix.shape[0] - 1)) for _ in range(2))
    elements, rows = matrix.clone(), matrix.clone()
    elements.view(-1)[[i, j]] = matrix.view(-1)[[j, i]]
    rows[[row, other_row]] = matrix[[other_row, row]]
    for other in (elements, rows, matrix.t(), matrix.flip(0), matrix.roll(1, 1)):
        assert (fingerprint(other) == fingerprint(matrix)) == torch.equal(bits(other), bits(matrix))


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_values_and_their_opposites_are_told_apart_in_any_place(dtype: torch.dtype) -> None:
    """Bit patterns with many zeros at their end: a sum of products could lose them."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, torch.inf, -torch.inf], dtype=dtype)
    pairs = [values[[i, j]] for i, j in itertools.product(range(len(values)), repeat=2)]
    at_ends = [torch.cat([pair[:1], torch.ones(1000, dtype=dtype), pair[1:]]) for pair in pairs]
    for tensors in (pairs, at_ends):
        assert len(set(fingerprints(tensors).tolist())) == len(tensors)


def test_a_fingerprint_is_of_the_values_and_not_of_how_they_lie_in_memory_and_every_shape_has_one() -> None:
    tensor = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    apart = torch.zeros(100)[1:97].view(6, 16)[:, ::4].copy_(tensor)
    turned = tensor.t().contiguous().t()
    assert len(set(fingerprints([tensor, apart, turned, torch.nn.Parameter(tensor)]).tolist())) == 1
    found = fingerprints([torch.tensor(1.0), torch.tensor(2.0), torch.empty(0, 3), torch.ones(1, 1, 1)])
    assert found.dtype == torch.int64
    assert found[0] == found[3] != found[1]
    assert fingerprints([]).shape == (0,)


def test_a_fingerprint_of_a_large_tensor_takes_little_memory() -> None:
    large = torch.zeros(20 * consistency.PIECE_NUMEL, dtype=torch.bfloat16)
    with StorageTracker() as tracker:
        fingerprint(large)
    assert tracker.peak < 4 * 8 * consistency.PIECE_NUMEL


def test_the_mixing_is_splitmix64_and_its_weights_are_odd() -> None:
    """One to one, and odd: without that a changed bit may be lost, too seldom for any other test here to see."""

    def mixed(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    numbers = [0, 1, -1, 2**63 - 1, -(2**63), *torch.randint(-(2**63), 2**63 - 1, (100,)).tolist()]
    found = consistency._mixed(torch.tensor(numbers)).tolist()
    assert [z % 2**64 for z in found] == [mixed(z % 2**64) for z in numbers]
    weights = consistency._odd(1000, torch.device("cpu"))
    assert weights.remainder(2).eq(1).all()
    assert len(weights.unique()) == 1000


# ---- Ballots ----------------------------------------------------------------------------------------------


@given(st.integers(2, 8192), st.data())
@quick(200)
def test_one_other_ballot_among_thousands_is_seen(ranks: int, data: st.DataObject) -> None:
    """The sums are exact in float64, and no two different ballots are close enough to hide."""
    bits = (53 - (ranks - 1).bit_length()) // 2
    h = data.draw(st.integers(0, 2**bits - 1) | st.just(2**bits - 1))
    others = data.draw(st.lists(st.integers(0, 2**bits - 1) | st.just(max(0, h - 1)), max_size=3))
    cast = torch.full((ranks,), float(h), dtype=torch.float64)
    cast[: len(others)] = torch.tensor(others, dtype=torch.float64)[:ranks]
    totals = [float(cast.sum()), float(cast.square().sum())]
    assert float(cast.square().sum()) == sum(int(x) ** 2 for x in cast.tolist()) < 2**53
    assert all_equal(totals, ranks) == (len(set(cast.tolist())) == 1)


@pytest.mark.parametrize(("ranks", "bits"), [(1, 26), (4, 25), (5, 25), (8192, 20), (8193, 19)])
def test_a_ballot_has_as_many_bits_as_sums_stay_exact(ranks: int, bits: int) -> None:
    numbers = [checksum([("lr", str(i))], ranks) for i in range(200)]
    assert all(square == h * h for h, square in numbers)
    assert 2 ** (bits - 1) <= max(h for h, _ in numbers) < 2**bits
    assert ranks * 2 ** (2 * bits) <= 2**53
    assert len({h for h, _ in numbers}) == len(numbers)
