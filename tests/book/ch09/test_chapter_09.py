"""Chapter 9's worker as its readers run it, and what its page says of blocks, of costs and of its small layers."""

import ast
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import stored_pages
import torch
import worlds

from distmuon.optim.newton_schulz import flops, newton_schulz, singular_values
from muonbook.ch09.experiments import momentum_of_digits, optimizer_cost
from muonbook.ch09.figures import pair
from muonbook.ch09.small_layers import whole_numbers
from muonbook.planner.fabrics import ADAPTER, FABRICS, NVLINK, PEAK_FLOPS, SUSTAINED

WORKER = str(worlds.ROOT / "scripts" / "09_tensor_parallel.py")


def test_muon_on_tp_ranks_is_certified_and_its_bytes_are_those_predicted() -> None:
    ending = worlds.perform(WORKER, "--tp", "2")  # its drift differs from machine to machine
    out = ending.out
    assert (ending.code, out.count("True.")) == (0, 4)
    rows = re.findall(r"^  all_gather +momentum, (\S+) +1 +([\d,]+) +([\d,]+)$", out, re.MULTILINE)
    sent = {name: [int(number.replace(",", "")) for number in numbers] for name, *numbers in rows}
    # half of each whole matrix, in bf16
    assert sent == {"layers.0.weight": [256 * 64] * 2, "layers.1.weight": [128 * 256] * 2}


def test_small_layers_are_the_whole_layers_and_gathers_the_whole_matrix(tmp_path: Path) -> None:
    file, tp = tmp_path / "new" / "small.json", 4  # the page has 2
    ending = worlds.perform(WORKER, "--small", "--tp", str(tp), "--json", str(file))
    assert (ending.code, ending.err) == (0, "")
    assert ending.out.count("equal on every rank: True") == 3
    assert "All-reduces: 1 forward, 1 backward." in ending.out
    bytes_sent = re.findall(r"predicted +(\d+), counted +(\d+)", ending.out)
    # ring formula: 2 (T - 1) / T of 2 x 3 outputs and of 2 x 4 inputs, in float32
    assert [tuple(map(int, pair)) for pair in bytes_sent] == [
        (12 * (tp - 1) * 4 // tp,) * 2,
        (16 * (tp - 1) * 4 // tp,) * 2,
    ]

    ranks = json.loads(file.read_text())
    assert len(ranks) == tp
    hidden, weight = (torch.cat([torch.tensor(rank["slices"][name]) for rank in ranks], 1) for name in ("H", "W2"))
    partial = torch.tensor([rank["slices"]["partial Y"] for rank in ranks])
    matrix = torch.arange(1.0, 17).view(4, 4)
    for rank in ranks:
        assert torch.equal(torch.tensor(rank["Y"]), hidden @ weight.T)
        assert torch.equal(torch.tensor(rank["Y"]), partial.sum(0))
        for name in ("dim 0", "dim 1"):
            assert torch.equal(torch.tensor(rank["gathers"][name]), matrix)
        wrong = torch.tensor(rank["gathers"]["cut along 0, put together along 1"])
        assert torch.equal(wrong, torch.cat(matrix.chunk(tp, 0), 1))
        assert "'copied.weight' does not say how it is cut over TP" in rank["refused"]


def in_blocks(matrix: torch.Tensor, T: int, dim: int) -> torch.Tensor:
    return torch.cat([newton_schulz(block) for block in matrix.chunk(T, dim)], dim)


def cosine(matrix: torch.Tensor, T: int, dim: int) -> float:
    whole, blocks = newton_schulz(matrix), in_blocks(matrix, T, dim)
    assert (blocks - whole).norm() > 0.2 * whole.norm()
    return float((blocks * whole).sum() / (blocks.norm() * whole.norm()))


def test_blocks_of_real_momentum_are_another_optimizer_and_the_more_so_the_larger_t() -> None:
    random = torch.Generator().manual_seed(9)
    momenta = momentum_of_digits(steps=10)
    assert [tuple(m.shape) for m in momenta] == [(256, 64), (128, 256), (128, 128)]
    for m in momenta:
        noise = torch.randn(m.shape, generator=random, dtype=torch.float64)
        for dim in (0, 1):
            cosines = [cosine(m, T, dim) for T in (2, 4, 8)]
            assert cosines == sorted(cosines, reverse=True)
            assert cosines[-1] < cosine(noise, 8, dim)  # and noise would have shown less
    for T in (2, 4, 8):  # "near √T"
        assert 0.9 * T**0.5 < singular_values(in_blocks(momenta[2], T, 0))[0] < 1.25 * T**0.5
    assert singular_values(newton_schulz(momenta[2]))[0] < 1.25


def test_no_number_of_tp_ranks_brings_newton_schulz_below_a_dth_of_the_model() -> None:
    eight, seven = ([optimizer_cost(T, D) for T in (1, 2, 4, 8)] for D in (8, 7))
    block = 4 * flops((1024, 1024)) + 2 * flops((1024, 4096))
    assert {cost.least_flops for cost in eight} == {24 * block / 8}
    assert [cost.cut_matrices for cost in eight] == [48, 24, 0, 0]  # "the boundaries fall between blocks"
    assert [cost.newton_schulz_flops == cost.least_flops for cost in eight] == [False, False, True, True]
    assert all(cost.cut_matrices and cost.newton_schulz_flops > cost.least_flops for cost in seven)
    assert eight[0].temporary_bytes == eight[1].temporary_bytes < eight[2].temporary_bytes < eight[3].temporary_bytes
    assert all(less.temporary_bytes < more.temporary_bytes for less, more in pairwise(seven))


def test_the_bound_on_t_is_where_messages_take_their_share_of_the_products() -> None:
    """Against the definitions: 6 operations per weight and token, 4 all-reduces of the residual stream in bf16."""
    (cell,) = (cell for cell in stored_pages.every_cell("09_tensor_parallel") if "def most_tp_ranks" in cell.source)
    names: dict[str, Any] = {}
    exec(cell.source, names)
    width, tokens, F, L = 8192, 4096, names["F"], 450e9
    for share in (0.2, 1.0):
        T = names["most_tp_ranks"](share, width, L)
        products = 6 * 12 * width**2 * tokens / T / F
        messages = 4 * 2 * (T - 1) / T * 2 * tokens * width / L
        assert messages == pytest.approx(share * products)


def test_what_the_page_says_of_the_peak_and_of_links() -> None:
    (cell,) = (cell for cell in stored_pages.every_cell("09_tensor_parallel") if "def most_tp_ranks" in cell.source)
    names: dict[str, Any] = {}
    exec(cell.source, names)
    assert names["F"] / PEAK_FLOPS == pytest.approx(SUSTAINED, abs=0.005)  # "40 per cent"
    assert int(names["most_tp_ranks"](0.2, 8192, NVLINK.bytes_per_second)) == 9
    names["F"] = PEAK_FLOPS
    assert int(names["most_tp_ranks"](0.2, 8192, NVLINK.bytes_per_second)) == 4
    assert names["most_tp_ranks"](0.42, 8192, NVLINK.bytes_per_second) == pytest.approx(8, abs=0.1)  # "42 per cent"
    two_hosts = FABRICS["nvlink_infiniband"].links(1, 16)["tp"]
    assert (ADAPTER.bytes_per_second, two_hosts.bytes_per_second) == (50e9, 400e9)


def test_the_page_has_the_numbers_of_the_picture() -> None:
    sources = [cell.source for cell in stored_pages.every_cell("09_tensor_parallel")]
    written = [
        re.findall(rf"^{name} = torch.tensor\((.*?)\)", "\n".join(sources), re.M) for name in ("X", "W1", "W2", "dY")
    ]
    for (first, *rest), tensor in zip(written, whole_numbers(), strict=True):
        assert not rest
        assert ast.literal_eval(first) == tensor.tolist()
    assert [pair()[f"Y{rank}"][0, 1].item() for rank in range(2)] == [3, -3]  # quick question 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dp", "2"], "--dp 2: this chapter has TP ranks only"),
        (["--small", "--tp", "8"], "--tp 8: these small matrices are cut in 2 or 4"),
        (["--tp", "3"], "--tp 3 does not divide"),
    ],
)
def test_what_does_not_fit_is_answered_in_a_sentence(arguments: list[str], words: str) -> None:
    ending = worlds.answer(WORKER, *arguments)
    assert ending.code == 2
    assert words in ending.err
