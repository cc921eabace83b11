"""Chapter 16: the five ways on other grids, and what the page computes and says of them."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import stored_pages
import worlds

from distmuon import launch
from distmuon.models.networks import Transformer
from distmuon.optim import strategies
from distmuon.sharding.layout import ParamSpec
from distmuon.sharding.ownership import padding_warning
from muonbook.ch16 import experiments
from muonbook.ch16.experiments import Count
from muonbook.measure import results

WORKER = str(worlds.ROOT / "scripts" / "16_owner.py")
BLOCK = {"qkv": (3072, 1024), "out": (1024, 1024), "up": (4096, 1024), "down": (1024, 4096)}  # the page's


def rows(out: str) -> dict[str, tuple[float, ...]]:
    """Return layout -> its numbers."""
    found = re.findall(r"^(\w[\w, -]+?)  +([\d.]+) +([\d.]+|-) +([\d.]+|-) +([\d.]+) MB$", out, re.M)
    return {name: tuple(float(number.replace("-", "0")) for number in numbers) for name, *numbers in found}


@pytest.mark.parametrize("grid", ["--dp 4 --tp 2", "--dp 8 --tp 1"])
def test_every_way_costs_no_more_than_the_one_before(grid: str) -> None:
    out = stored_pages.printed("16_owner", f"python ../scripts/16_owner.py {grid}")
    assert out.splitlines()[-1].endswith("as predicted: True.")
    table = rows(out)
    assert list(table) == [experiments.ADAMW, *experiments.LAYOUTS]
    _, buckets, flat, cut, owner, updates = table.values()
    assert updates[0] < 1 <= owner[0] < cut[0] < min(flat[0], buckets[0])
    assert owner[1:3] == updates[1:3] == (1, 1)
    assert cut[1] == flat[1] < buckets[1]
    assert flat[3] > buckets[3]


@pytest.mark.parametrize(("dp", "tp"), [(3, 1), (1, 2)])
def test_on_any_grid_bytes_and_operations_are_those_predicted(dp: int, tp: int) -> None:
    ranks = launch.run(experiments.take_steps, dp=dp, tp=tp)[0]
    assert len(ranks) == dp * tp
    assert experiments.all_as_predicted(ranks)
    if tp == 1:  # gradients to their shards, and parameters back: a rank sends all shards but its own
        parameters = sum(p.numel() for p in Transformer(**experiments.SHAPE).parameters())  # type: ignore[arg-type,misc]
        assert ranks[0][experiments.ADAMW].sent == pytest.approx(2 * 4 * parameters * (dp - 1) / dp, rel=0.01)
    for name, layout in experiments.LAYOUTS.items():
        work = sum(rank[name].flops for rank in ranks)
        assert work == experiments.once() if layout.strategy == "owner" else work >= experiments.once()


def test_the_table_is_of_all_ranks_and_its_slowest_and_fullest_are_one_of_them() -> None:
    once = int(experiments.once())
    ranks = [
        {experiments.ADAMW: Count(100, 0, 10**7, True), "a layout": Count(150, once, 2 * 10**7, True)},
        {experiments.ADAMW: Count(300, 0, 3 * 10**7, True), "a layout": Count(450, 3 * once, 10**7, True)},
    ]
    table = rows("\n".join(experiments.lines(ranks)))
    assert table == {experiments.ADAMW: (1, 0, 0, 30), "a layout": (1.5, 4, 6, 20)}


@pytest.mark.parametrize("what", ["predict_step", "predict_work", "predict_transient"])
def test_a_prediction_that_is_not_kept_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process sends nothing, so that a collective is one too many."""
    right = getattr(experiments, what)

    def wrong(*given: Any, **options: Any) -> Any:
        found = right(*given, **options)
        if what == "predict_step":
            found.record("all_gather", "dp", 2, 8, "momentum, of another")
            return found
        return {rank: work + 1 for rank, work in found.items()} if what == "predict_work" else 1

    monkeypatch.setattr(experiments, what, wrong)
    (rank,) = launch.run(experiments.take_steps)[0]
    assert not any(rank[name].as_predicted for name in experiments.LAYOUTS)


def test_a_wrong_count_is_not_as_predicted() -> None:
    ranks = launch.run(experiments.take_steps)[0]  # one process sends nothing
    assert experiments.lines(ranks)[-1].endswith("True.")
    ranks[0][experiments.ADAMW] = ranks[0][experiments.ADAMW]._replace(as_predicted=False)
    assert not experiments.all_as_predicted(ranks)
    assert experiments.lines(ranks)[-1].endswith("False.")


def test_heads_that_tp_does_not_divide_are_refused_in_a_sentence() -> None:
    ending = worlds.answer(WORKER, "--tp", "3")
    assert ending.code == 2
    assert "--tp 3 does not divide the model's 8 heads; choose 1, 2, 4 or 8." in ending.err


# ---- What the cells compute -------------------------------------------------------------------------------


def said() -> str:
    """Return all that the chapter's cells print."""
    return "".join(cell.printed for cell in stored_pages.cells("16_owner"))


def test_each_toy_is_what_the_engine_does() -> None:
    page = said()
    for line in (
        "same as the engine's map: True",
        "equal, bit for bit: True  Newton–Schulz on 6 matrices, 6 times",
        "AdamW's update, sent in bf16: False",
    ):
        assert line in page


def test_what_the_page_says_of_padding_and_of_the_exchange() -> None:
    found = re.findall(r"^ +(\d+) +([\d.]+)% +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", said(), re.M)
    ranks, padding, owner, owner_slowest, cut, cut_slowest = zip(*[map(float, row) for row in found], strict=True)
    assert ranks == (4, 8, 16, 20, 24, 32, 64, 96, 192)
    assert "96 matrices " in said()
    assert [n for n, padded in zip(ranks, padding, strict=True) if padded == 0] == [4, 8, 16, 24]
    assert min(padding[5:]) == padding[5] >= 11
    assert owner[:3] == (1, 1, 1)
    assert max(cut) <= 1.003
    assert round(owner[-1], 1) == 2.7
    assert [n for n, worst in zip(ranks, cut_slowest, strict=True) if worst == 1] == [4, 8, 24]
    assert list(cut_slowest[5:]) == sorted(cut_slowest[5:])
    assert (cut_slowest[3], cut_slowest[-1]) == (1.40, 5.14)
    pairs = list(zip(owner_slowest, cut_slowest, strict=True))
    assert all(by_owner < by_cut for by_owner, by_cut in pairs if by_cut > 1)


def test_on_24_ranks_shards_are_equally_long_and_not_alike_and_on_192_padding_takes_4_gigabytes() -> None:
    model = [ParamSpec(f"{i}.{name}", shape, "float32") for i in range(24) for name, shape in BLOCK.items()]
    layout = strategies.planner("owner")(model, range(len(model)), 24, 1, 25_000_000)
    for bucket in layout.buckets:
        shards: dict[int, list[str]] = {}
        for index, start in zip(bucket.params, bucket.starts, strict=True):
            shards.setdefault(start // (bucket.padded // 24), []).append(model[index].name.partition(".")[2])
        kinds = Counter("+".join(sorted(names)) for names in shards.values())
        assert kinds == {"up": 8, "down": 8, "out+qkv": 8}
    assert len(layout.buckets) == 3
    assert re.search(r"^ +24 +0\.0% +1\.000 +1\.07 ", said(), re.M)
    layout = strategies.planner("owner")(model, range(len(model)), 192, 1, 25_000_000)
    assert "which is 4.0 GB of weights and gradients on every rank" in (padding_warning(layout) or "")


@pytest.mark.parametrize(
    "block",
    [
        BLOCK,
        {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "out": (4096, 4096), "gate": (14336, 4096),
         "up": (14336, 4096), "down": (4096, 14336)},
    ],
)  # fmt: skip
def test_at_most_three_per_cent_is_padded_if_the_ranks_divide_the_layers(block: dict[str, tuple[int, int]]) -> None:
    for layers in (24, 32, 80):
        model = [ParamSpec(f"{i}.{name}", block[name], "float32") for i in range(layers) for name in block]
        for ranks in (n for n in range(2, layers + 1) if layers % n == 0):
            owned = strategies.planner("owner")(model, range(len(model)), ranks, 1, 25_000_000)
            assert owned.padding <= 0.03, (layers, ranks)


def test_what_the_page_says_of_blocks() -> None:
    """It is one sentence: worse on all of eight seeds, with 2, 4 and 8 blocks."""
    study = results.load("blocks")
    in_every_step = {row["blocks"]: row["worse"] for row in study["rows"] if row["whole_every"] == 0}
    assert in_every_step == {2: 8, 4: 8, 8: 8}
    assert len(study["seeds"]) == 8
