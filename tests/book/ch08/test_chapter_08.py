"""Chapter 8's worker as its readers run it, and the ways to gather many matrices that it compares."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import worlds

from distmuon.sharding.collectives import Group
from distmuon.sharding.layout import ParamSpec, plan
from muonbook.ch08 import moving_gather
from muonbook.ch08.trace_one_matrix import SMALL
from muonbook.figures import player
from muonbook.measure import coalescing

WORKER = str(worlds.ROOT / "scripts" / "08_muon_over_dp.py")


def test_muon_is_certified_and_its_bytes_are_those_predicted() -> None:
    ending = worlds.finish(WORKER, "--dp", "2", "--steps", "2")
    assert (ending.code, ending.err) == (0, "")
    assert ending.out.count("True.") == 5
    rows = dict(re.findall(r"^  (gradients|momentum|parameters) +[\d,]+ +([\d,]+)$", ending.out, re.MULTILINE))
    sent = {name: int(number.replace(",", "")) for name, number in rows.items()}
    assert sent["gradients"] == sent["parameters"]
    assert sent["momentum"] == 65_536  # half of the hidden matrices' elements, in bf16


def test_ranks_that_do_not_divide_eight_get_a_batch_that_fits_them() -> None:
    ending = worlds.finish(WORKER, "--dp", "3", "--steps", "2")
    assert (ending.code, ending.err) == (0, "")
    assert "Muon on 3 DP ranks, float32, 2 steps" in ending.out
    assert ending.out.count("True.") == 5


def test_following_a_matrix_tells_what_every_rank_held(tmp_path: Path) -> None:
    ending = worlds.finish(WORKER, "--follow", "--json", f"{tmp_path}/new/follow.json")
    assert (ending.code, ending.err) == (0, "")
    assert "bit for bit: True." in ending.out
    ranks = json.loads((tmp_path / "new" / "follow.json").read_text())
    assert [rank["count"] for rank in ranks] == [[0, 0, 0, 0], [6, 20, 20, 6], [9, 20, 20, 9], [5, 20, 20, 5]]
    assert ranks[0]["after"] is None
    owners = [source for row in ranks[1]["sources"] for leaf in row for source in leaf]
    assert owners == [1] * 6 + [2] * 9 + [3] * 5


def test_the_moving_gather_holds_what_the_ranks_of_a_run_hold() -> None:
    frames = moving_gather.frames_of_gather(plan(SMALL, 4), muon=(0, 1), followed=1)
    held = [[int(n) for n in re.findall(r"\d+", frame.alt.rpartition(" hold ")[2])] for frame in frames]
    before, after, whole = [0, 6, 9, 5], [20] * 4, [0, 20, 20, 20]  # as the worker counts, in the test above
    assert [held[0], held[1], held[4], held[5], held[6], held[7]] == [before, before, after, whole, whole, before]
    assert held[2] == [5, 6, 15, 14]  # each shard, and its left neighbour's
    assert "Each has sent 54 bytes" in frames[4].caption  # as the worker counts, too
    assert len(player.html("gather", frames)) < 60_000


def test_all_ways_to_gather_give_the_same_matrices() -> None:
    ending = worlds.finish(WORKER, "--ways", "--dp", "3")
    assert (ending.code, ending.err) == (0, "")
    assert ending.out.count("True.") == 2
    rows = re.findall(r"^(\w[^0-9]+?) +(\d+) +(\d+) +([\d,]+) +[\d.]+%$", ending.out, re.MULTILINE)
    asked, made = ([int(row[column]) for row in rows] for column in (1, 2))
    assert [row[0] for row in rows] == [way.name for way in coalescing.WAYS]
    assert asked[:3] == [40, 40, 40]
    assert made[2] == 1
    assert asked[3] == made[3] < 10


def test_a_gpus_tensors_are_not_coalesced_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalescing, "backend_of", lambda group, device: "gloo")
    of_a_gpu: Any = SimpleNamespace(is_cuda=True)
    with pytest.raises(NotImplementedError, match="gloo coalesces no collectives of a GPU's tensors"):
        coalescing.coalesced(Group("dp", 2), plan([], 2, 1), [of_a_gpu])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--ways", "--dp", "1"], "one rank has nothing to gather"), (["--tp", "2"], "--tp 2: this chapter has DP ranks")],
)
def test_what_does_not_fit_is_answered_in_a_sentence(arguments: list[str], words: str) -> None:
    ending = worlds.answer(WORKER, *arguments)
    assert ending.code == 2
    assert words in ending.err


def test_shards_put_together_are_the_padded_bucket() -> None:
    specs = [ParamSpec("a", (3, 3), "float32"), ParamSpec("b", (2, 4), "float32")]
    layout = plan(specs, dp=5)
    whole = [torch.arange(1.0, 10.0), torch.arange(10.0, 18.0)]
    shards = [coalescing.shards_of(layout, whole, rank) for rank in range(5)]
    assert [len(shard) for (shard,) in shards] == [4] * 5
    assert torch.cat([shard for (shard,) in shards]).tolist() == [*range(1, 18), 0, 0, 0]
    assert torch.equal(coalescing.cut_out(layout, [torch.cat([shard for (shard,) in shards])])[1], whole[1])
