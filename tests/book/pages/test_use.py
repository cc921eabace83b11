"""The page that one starts from: what it says of costs is what the code computes, and what it measures bears it out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distmuon.optim.muon import Muon
from distmuon.optim.newton_schulz import flops
from muonbook.measure import results

ROOT = Path(__file__).resolve().parents[3]
PAGE = " ".join((ROOT / "book" / "use.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("width", "tokens", "words"), [(4096, 2**19, "you pay 4 %"), (4096, 4096, "five times the work")]
)
def test_newton_schulz_takes_five_widths_over_tokens_of_the_work_of_training(
    width: int, tokens: int, words: str
) -> None:
    training = 6 * width * width * tokens  # two operations per weight and token forwards, four backwards
    share = flops((width, width)) / training
    assert share == pytest.approx(5 * width / tokens, rel=0.01)
    assert words in PAGE
    assert share == pytest.approx({"you pay 4 %": 0.04, "five times the work": 5.0}[words], rel=0.03)


def test_the_measured_line_learns_better_on_every_seed_and_in_fewer_steps() -> None:
    found = results.load("one_line")
    best = found["best"]
    assert max(best["muonw"]["losses"]) < min(best["adamw"]["losses"])
    assert best["first_to_try"]["lr"] == pytest.approx(0.01)
    assert max(best["first_to_try"]["losses"]) < min(best["adamw"]["losses"])
    assert found["steps_to_adamws_end"] < found["model"]["steps"]
    assert found["replicas"]["cpu_shared_over_alone"]["quartiles"][1] < 0.6
    for optimizer in ("adamw", "muonw"):  # neither optimizer's best rate is at an end of those that were tried
        rates = [row["lr"] for row in found[optimizer]]
        assert min(rates) < best[optimizer]["lr"] < max(rates)


def test_the_contract_says_how_large_muons_updates_are() -> None:
    updates = results.load("claims")["update_rms_in_training"]["muon"]
    assert all(0.1 < watched["median"] < watched["most"] < 0.2 for watched in updates)


def test_chapter_17_counts_364_collectives_and_two() -> None:
    chapter = (ROOT / "notebooks" / "17_muonw.ipynb").read_text(encoding="utf-8")
    assert re.search(r"torch\.optim\.Muon +364 ", chapter)
    for page in ("use.md", "index.md"):
        assert "364" in (ROOT / "book" / page).read_text(encoding="utf-8")


def test_every_example_that_is_linked_is_there() -> None:
    linked = re.findall(r"/blob/main/(scripts/examples/\w+\.py)", PAGE)
    assert len(set(linked)) >= 4
    assert [file for file in linked if not (ROOT / file).is_file()] == []


def test_the_block_on_fused_weights_divides_them() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "book" / "use.md").read_text(), re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if "qkv" in block)
    layer = nn.ModuleDict({"qkv": nn.Linear(8, 24, bias=False), "out": nn.Linear(8, 8, bias=False)})
    known: dict[str, Any] = {"model": nn.Sequential(layer, nn.LayerNorm(8), nn.Linear(8, 5))}
    exec(block, known)
    found = {n: g["matrices"] for g in known["optimizer"].param_groups if "matrices" in g for n in g["param_names"]}
    assert found == {"0.qkv.weight": ("rows", 3), "0.out.weight": "whole"}
    for p in known["model"].parameters():
        p.grad = torch.randn_like(p)
    known["optimizer"].step()


def test_parts_that_lie_beside_each_other_are_refused_with_the_option_that_fits() -> None:
    weight = ("c_attn", nn.Parameter(torch.ones(8, 24)))
    with pytest.raises(ValueError, match=re.escape("the parts lie beside each other, so give ('columns', 3).")):
        Muon([weight], matrices=("fused", (8, 8, 8)))


def test_the_story_says_by_how_much_muon_leads_after_the_same_steps_and_after_the_same_time() -> None:
    found = results.load("one_line")
    adamw, muon = (found["best"][name]["course"] for name in ("adamw", "muonw"))
    story = " ".join((ROOT / "book" / "story.md").read_text(encoding="utf-8").split())
    place = len(muon[1:]) / found["clock"]["training_step_over_adamws"]["median"]  # where AdamW ends, in evaluations
    before = int(place)
    then = muon[before] + (place - before) * (muon[before + 1] - muon[before])
    leads = f"ahead by {adamw[-1] - then:.2f} nats per byte instead of {adamw[-1] - muon[-1]:.2f}"
    assert leads in story
    assert f"When AdamW ends at {adamw[-1]:.2f}, Muon is at {then:.2f}." in story
    slow, fast = (next(row["course"] for row in found["muonw"] if row["lr"] == rate) for rate in (0.003, 0.02))
    assert slow[2] > adamw[2]
    assert slow[-1] < adamw[-1]
    assert all(m < a for m, a in zip(fast[1:], adamw[1:], strict=True))
