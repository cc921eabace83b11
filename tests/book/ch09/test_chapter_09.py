"""Chapter 9's worker as its readers run it: a pair of cut layers, the gathers, the certificate, the bytes."""

import json
import re
from pathlib import Path

import pytest
import torch
import worlds

WORKER = str(worlds.ROOT / "scripts" / "09_tensor_parallel.py")


def test_muon_on_tp_ranks_is_certified_and_its_bytes_are_those_predicted() -> None:
    ending = worlds.finish(WORKER, "--tp", "2", "--steps", "2")
    assert (ending.code, ending.err) == (0, "")
    assert ending.out.count("True.") == 4
    rows = re.findall(r"^  all_gather +momentum, (\S+) +1 +([\d,]+) +([\d,]+)$", ending.out, re.MULTILINE)
    sent = {name: [int(number.replace(",", "")) for number in numbers] for name, *numbers in rows}
    # half of each whole matrix, in bf16
    assert sent == {"layers.0.weight": [256 * 64] * 2, "layers.1.weight": [128 * 256] * 2}


@pytest.mark.parametrize("tp", [2, 4])
def test_small_layers_are_the_whole_layers_and_gathers_the_whole_matrix(tp: int, tmp_path: Path) -> None:
    file = tmp_path / "new" / "small.json"
    ending = worlds.finish(WORKER, "--small", "--tp", str(tp), "--json", str(file))
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
        summed, sources = rank["Y"]
        assert torch.equal(torch.tensor(summed), hidden @ weight.T)
        assert torch.equal(torch.tensor(summed), partial.sum(0))
        assert all(leaf == list(range(tp)) for row in sources for leaf in row)
        for name in ("dim 0", "dim 1"):
            assert torch.equal(torch.tensor(rank["gathers"][name][1]), matrix)
        wrong = torch.tensor(rank["gathers"]["cut along 0, put together along 1"][1])
        assert torch.equal(wrong, torch.cat(matrix.chunk(tp, 0), 1))
        assert "'copied.weight' does not say how it is cut over TP" in rank["refused"]


def test_one_bucket_and_single_calls_gather_the_same() -> None:
    ending = worlds.finish(WORKER, "--time")
    assert (ending.code, ending.err) == (0, "")
    assert "bit for bit: True." in ending.out
    assert len(re.findall(r"^ *\d+ of +\d+ x \d+ +[01] +\d+\.\d\d$", ending.out, re.MULTILINE)) == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dp", "2"], "--dp 2: this chapter has TP ranks only"),
        (["--small", "--tp", "3"], "--tp 3"),
        (["--time", "--tp", "8"], "--tp 8: these small matrices are cut in 2 or 4"),
        (["--tp", "3"], "--tp 3 does not divide"),
    ],
)
def test_what_does_not_fit_is_answered_in_a_sentence(arguments: list[str], words: str) -> None:
    ending = worlds.answer(WORKER, *arguments)
    assert ending.code == 2
    assert words in ending.err
