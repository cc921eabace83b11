"""Chapter 3's worker: it trains, what it prints is what the chapter says of it, and wrong arguments get a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds

from distmuon import MuonW
from distmuon.optim.muon import Muon
from distmuon.optim.param_groups import split_parameters
from muonbook.ch03 import experiments, figures

WORKER = str(worlds.ROOT / "scripts" / "03_muon.py")


def test_the_hybrid_learns_the_digits(tmp_path: Path) -> None:
    ending = worlds.perform(WORKER, "--json", f"{tmp_path}/new/training.json")
    assert (ending.code, ending.err) == (0, "")
    curves = json.loads((tmp_path / "new" / "training.json").read_text())
    assert curves["loss"][0] > 2 > 0.1 > curves["loss"][-1]
    sizes, errors, norms = (curves[name] for name in ("update RMS", "orthogonality error", "spectral norm"))
    assert all(0.10 < size < 0.18 for size in sizes)  # as the page says
    assert all(0.45 < error < 0.85 for error in errors)
    assert norms[-1] / norms[0] == pytest.approx(2, abs=0.1)
    assert float(ending.out.rsplit(maxsplit=1)[1]) > 0.9


def test_once_is_enough_for_muon_to_keep_a_row_moving() -> None:
    adamw, seen = experiments.embedding_run(torch.optim.AdamW)
    muon, also_seen = experiments.embedding_run(Muon)
    assert seen == also_seen
    assert muon[-1][experiments.ONCE] > 0.5 * muon[-1][0] > 0
    assert 0 < adamw[-1][experiments.ONCE] < 0.1 * adamw[-1][0]
    assert all(rows[experiments.NEVER] == 0 for rows in (*adamw, *muon))


def test_adamws_first_update_is_a_sign_but_for_one_entry_in_twenty() -> None:
    _, _, (update,) = experiments.watched_run(experiments.adamw_alone, 1, lambda _, update: update)
    assert (update == 0).double().mean().item() == pytest.approx(1 / 20, abs=0.005)
    torch.testing.assert_close(update[update != 0].abs().median().item(), 1.0, rtol=1e-3, atol=0)


def test_hybrid_hands_its_options_to_the_right_optimizer() -> None:
    model, _, _ = experiments.fresh()
    muon, adamw = experiments.hybrid(model, lr=0.5, weight_decay=0.25, scale="original")
    assert [p.ndim for group in muon.param_groups for p in group["params"]] == [2, 2, 2]
    assert sum(p.numel() for o in (muon, adamw) for g in o.param_groups for p in g["params"]) == sum(
        p.numel() for p in model.parameters()
    )
    assert {(g["lr"], g["weight_decay"]) for o in (muon, adamw) for g in o.param_groups} == {(0.5, 0.25)}
    assert muon.param_groups[0]["scale"] == "original"


def test_a_convolution_is_one_product_and_only_a_networks_first_stays_with_adamw() -> None:
    first, second = torch.nn.Conv2d(1, 8, 3), torch.nn.Conv2d(8, 5, 3, bias=False)
    muon, adamw = split_parameters(torch.nn.Sequential(first, second, torch.nn.Flatten(), torch.nn.Linear(5, 10)))
    assert (muon["matrices"], [name for name, _ in muon["params"]]) == ("flattened", ["1.weight"])
    assert [name for name, _ in adamw["params"]] == ["0.weight", "0.bias", "3.weight", "3.bias"]
    picture = torch.randn(1, 8, 6, 6)
    by_product = second.weight.flatten(1) @ torch.nn.functional.unfold(picture, 3)  # [5, 72] @ [1, 72, 16]
    torch.testing.assert_close(by_product.view(1, 5, 4, 4), second(picture))


# ---- The step as a picture that moves ---------------------------------------------------------------------


def test_the_picture_ends_where_the_optimizer_ends() -> None:
    *_, weights, _, applied = figures.lines()
    weight = torch.nn.Parameter(weights.matrix.clone())
    options: dict[str, Any] = {"lr": figures.LR, "momentum": figures.MOMENTUM, "weight_decay": figures.DECAY}
    optimizer = Muon([weight], **options)
    for step in range(figures.STEPS):
        weight.data = weights.matrix.clone()  # only the last step is drawn
        weight.grad = figures.gradient(step)
        optimizer.step()
    assert torch.equal(weight.data, applied.matrix)


def test_what_a_cell_is_made_from_is_what_the_frame_says(monkeypatch: pytest.MonkeyPatch) -> None:
    before, gradient = figures.lines(), figures.gradient

    def another(step: int) -> torch.Tensor:
        changed = gradient(step)
        changed[2, 3] += 0.5
        return changed

    monkeypatch.setattr(figures, "gradient", another)
    mixed = False
    for old, new in zip(before, figures.lines(), strict=True):
        mixed = mixed or old.needs == figures.FROM_ALL
        if old.title in ("The weights", "Decay"):
            assert torch.equal(old.matrix, new.matrix)  # no gradient comes into them
        else:
            moved = (old.matrix != new.matrix).nonzero().tolist()
            assert len(moved) == old.matrix.numel() if mixed else moved == [[2, 3]]
    assert [line.needs for line in before].count(figures.FROM_ALL) == 1


def test_muonw_takes_the_steps_of_the_two_optimizers_that_the_chapter_makes() -> None:
    apart, together = (experiments.fresh()[0] for _ in range(2))
    groups = split_parameters(apart, decay_vectors=False)
    muon, adamw = ([g for g in groups if g["algorithm"] == algorithm] for algorithm in ("muon", "adamw"))
    pair = (Muon(muon, lr=0.01, weight_decay=0.1), torch.optim.AdamW(adamw, lr=0.003, weight_decay=0.1))
    for model, optimizers in ((apart, pair), (together, (MuonW(together, lr=0.01, adamw_lr=0.003),))):
        random = torch.Generator().manual_seed(3)
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=random, dtype=p.dtype)
            for optimizer in optimizers:
                optimizer.step()
    for ours, theirs in zip(together.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
