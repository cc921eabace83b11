"""A device without float64, imitated on the CPU: everything that steps, clips, measures or scales works there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distmuon import launch
from distmuon.extras.qk_clip import AttentionHeads, QKClip
from distmuon.launch import World
from distmuon.metrics import Metrics
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.muon import Muon
from distmuon.optim.muonw import MuonW
from distmuon.optim.newton_schulz import cosine_to_polar, newton_schulz, orthogonality_error, singular_values
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.consistency import RankMismatchError
from distmuon.sharding.grid import Grid

KINDS: dict[str, Callable[[nn.Module, Grid], Any]] = {
    "Muon": lambda model, grid: Muon(model.parameters(), lr=0.02),
    "MuonW": lambda model, grid: MuonW(model, lr=0.02),
    "MuonW's AdamW": lambda model, grid: MuonW([{"params": [*model.parameters()], "algorithm": "adamw"}], lr=0.02),
    "Zero1AdamW": lambda model, grid: Zero1AdamW(model.named_parameters(), grid, lr=0.02),
    "DistributedMuon": lambda model, grid: DistributedMuon(model.named_parameters(), grid, lr=0.02),
}
# Muon leaves these to torch, whose GradScaler needs float64 on all devices but MPS itself
TORCHS_OWN = ("clips gradients", "scales")


class NoFloat64(TorchDispatchMode):
    """Inside, an operation that takes or makes a float64 tensor raises what it raises on MPS."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, found)):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float64 and tensor.numel():
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support it.")
        return found


class Net(nn.Module):
    """Two matrices, drawn in float32: queries of 4 heads, and keys of 2 heads from behind them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [8, 6] -> [1, 4, 8, 2], [1, 2, 8, 2]
        query = self.query(x)
        q, k = (y.view(1, 8, -1, 2).transpose(1, 2) for y in (query, self.key(query.tanh())))
        return q, k


class Trained:
    """The net after three steps. seen: numbers that its user would look at."""

    def __init__(self, kind: str, does: str, dtype: torch.dtype, grid: Grid | None = None) -> None:
        self.net, self.seen = Net().to(dtype), list[float]()
        optimizer = KINDS[kind](self.net, Grid.alone() if grid is None else grid)
        metrics = Metrics(optimizer, every=1) if does == "measures" else None
        layer = {"layer": AttentionHeads(self.net.query, self.net.key, 4, 2)}
        clip = QKClip(optimizer, layer, threshold=0.1) if does == "clips logits" else None
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=does == "scales")
        for batch in torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1)).to(dtype):
            optimizer.zero_grad()
            q, k = self.net(batch)
            scaler.scale(q.square().mean() + (k - 1).square().mean()).backward()
            if clip is not None:
                clip.record("layer", q, k)
            if does == "clips gradients":
                self.seen.append(float(optimizer.clip_grad_norm_(0.1)))
            scaler.step(optimizer)
            scaler.update()
            if metrics is not None:
                self.seen += metrics.latest["totals"].values()
                for sample in metrics.latest["samples"].values():
                    self.seen += [sample["error"], sample["cosine"], *sample["singular_values"]]
            if clip is not None:
                self.seen += clip.summary().values()
        self.weights = torch.cat([p.detach().float().flatten() for p in self.net.parameters()])


def alike(found: Trained, wanted: Trained) -> None:
    assert torch.allclose(found.weights, wanted.weights, rtol=1e-4, atol=1e-6)
    assert found.seen == pytest.approx(wanted.seen, rel=1e-4, abs=1e-6)
    assert len(found.seen) == len(wanted.seen)


@pytest.mark.parametrize("does", ["steps", "clips gradients", "measures", "scales", "clips logits"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_and_all_around_it_needs_no_float64(kind: str, does: str) -> None:
    if kind == "Muon" and does in TORCHS_OWN:
        return
    for dtype in (torch.float32, torch.bfloat16):
        with NoFloat64():
            found = Trained(kind, does, dtype)
        alike(found, Trained(kind, does, dtype))


def test_what_looks_at_a_matrix_needs_no_float64() -> None:
    x = torch.randn(12, 20, generator=torch.Generator().manual_seed(0))
    looks: list[Callable[[Tensor], Tensor]] = [
        singular_values, orthogonality_error, lambda x: cosine_to_polar(x, newton_schulz(x))
    ]  # fmt: skip
    for look in looks:
        with NoFloat64():
            found = look(x)
        assert look(x).dtype == torch.float64
        assert torch.allclose(found.double(), look(x), rtol=1e-4)


def two_ranks(world: World) -> list[str]:
    """Return what is wrong on this rank, where ranks train together, and where one has another learning rate."""
    grid, wrong = Grid.of(world), []
    for kind in ("Zero1AdamW", "DistributedMuon"):
        wanted = Trained(kind, "clips gradients", torch.float32, grid)
        with NoFloat64():
            found = Trained(kind, "clips gradients", torch.float32, grid)
            optimizer = KINDS[kind](found.net, grid)
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + world.rank)
            found.net(torch.ones(8, 6))[0].sum().backward()
            try:
                optimizer.step()
                wrong.append(f"{kind}: nobody has noticed the other learning rate")
            except RankMismatchError:
                pass
        try:
            alike(found, wanted)
        except AssertionError as error:
            wrong.append(f"{kind}: {error}")
    return wrong


def test_ranks_without_float64_agree_and_find_out_where_they_do_not() -> None:
    assert launch.run(two_ranks, dp=2) == [[], []]
