"""The job of part III: a small language model of pixels, the same for every baseline, grid and link.

The language is real and needs no download: each of scikit-learn's 1,797 handwritten digits, read row by row, is a
sentence of 64 words, the intensities 0 to 16, behind a word that means "a new picture". The transformer of `models`
predicts the next pixel from those before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from distmuon.launch import UsageError

if TYPE_CHECKING:  # not at run time: a wrong argument is answered without importing torch
    import torch
    from torch import Tensor

    from distmuon.models.networks import Transformer
    from distmuon.sharding.collectives import Group
    from distmuon.sharding.grid import Grid
    from distmuon.sharding.layout import Layout

NEW_PICTURE = 17  # the word before a picture; 0 to 16 are intensities


@dataclass(frozen=True)
class Workload:
    """Model and batch, on any grid.

    vocabulary, width, layers, heads, context: of the transformer; words beyond the first 18 are never used, as in every
    padded vocabulary. sequences: of `context` tokens per step, over all DP ranks. dtype: of the model; master weights
    are float32 or wider. bucket_size: elements, of our optimizers. gather_dtype: in which Muon's momentum travels, by
    name; None: bfloat16.
    """

    vocabulary: int = 64
    width: int = 128
    layers: int = 2
    heads: int = 8
    context: int = 64
    sequences: int = 8
    dtype: str = "float32"
    gather_dtype: str | None = None
    bucket_size: int = 1 << 18
    lr: float = 0.01
    weight_decay: float = 0.1
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.dtype)

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Of every optimizer, by the names that torch and ours give them."""
        return {"lr": self.lr, "weight_decay": self.weight_decay}

    @property
    def tokens(self) -> int:
        """Tokens per step, over all ranks."""
        return self.sequences * self.context

    def fits(self, dp: int, tp: int) -> bool:
        """Say whether the model can be cut over `tp` ranks, and the batch shared out over `dp`."""
        return self.heads % tp == 0 and self.sequences % dp == 0

    def check(self, dp: int, tp: int) -> Workload:
        """Return the workload if it fits a dp x tp grid; raise UsageError, naming the value and the remedy, if not."""
        if tp >= 1 and self.heads % tp:
            fitting = ", ".join(str(t) for t in range(1, self.heads + 1) if self.heads % t == 0)
            raise UsageError(f"--tp {tp} does not divide the model's {self.heads} heads; choose one of {fitting}.")
        if dp >= 1 and self.sequences % dp:
            raise UsageError(
                f"{self.sequences} sequences cannot be shared out by --dp {dp} ranks; choose a divisor of it."
            )
        return self

    def shared_by(self, dp: int, each: int = 1) -> Workload:
        """Return this workload with `each` sequences per DP rank and step."""
        return replace(self, sequences=dp * each)

    def model(self, tp: Group) -> Transformer:
        """Return the TP-local model with torch's default weights; on the device that is torch's default."""
        from distmuon.models.networks import Transformer

        return Transformer(self.vocabulary, self.width, self.layers, self.heads, self.context, tp).to(self.torch_dtype)

    def weights(self) -> dict[str, Tensor]:
        """Return the whole initial weights in the model's dtype: {name: tensor}, the same on every rank. To be read."""
        return _initial_weights(replace(self, sequences=0, bucket_size=0, gather_dtype=None, lr=0.0, weight_decay=0.0))

    def plan(self, dp: int, tp: int, algorithm: str = "muon") -> tuple[Layout, list[int], Transformer]:
        """Return the map, the indices of its Muon parameters, and the TP-local model without storage; starts nothing.

        algorithm: "muon", or "adamw" for a map in which no parameter goes to Muon.
        """
        same_map = replace(self, sequences=0, gather_dtype=None, lr=0.0, weight_decay=0.0, seed=0)
        layout, muon, model = _planned(same_map, dp, tp, algorithm)
        return layout, list(muon), model


@lru_cache(maxsize=16)  # baselines are predicted one after the other, and most share a map; the model is only read
def _planned(of: Workload, dp: int, tp: int, algorithm: str) -> tuple[Layout, list[int], Transformer]:
    import torch

    from distmuon.optim.param_groups import groups_for, plan_groups
    from distmuon.sharding.collectives import Group

    with torch.device("meta"):
        model = of.model(Group("tp", tp))
    return *plan_groups(groups_for(model, algorithm), dp, of.bucket_size), model


@lru_cache(maxsize=1)  # baselines start from the same, one after the other
def _initial_weights(of: Workload) -> dict[str, Tensor]:
    import torch

    from distmuon.models.networks import initial_weights
    from distmuon.sharding.collectives import Group

    with torch.device("meta"):  # names and shapes are all that is asked of the model
        model = of.model(Group("tp"))
    with torch.device("cpu"):
        return {name: weight.to(of.torch_dtype) for name, weight in initial_weights(model, of.seed).items()}


# Between them they can be cut over every T from 1 to 8. No bucket size is round: matrices straddle, and all are padded.
SHAPES: dict[str, Workload] = {
    "even": Workload(vocabulary=64, width=128, layers=2, heads=8, context=64, bucket_size=100_003),
    "tall": Workload(vocabulary=1000, width=96, layers=3, heads=6, context=32, bucket_size=65_536),
    "odd": Workload(vocabulary=67, width=105, layers=1, heads=35, context=48, bucket_size=20_011),
}

TIMED = Workload(width=256, layers=4)  # 3.1 million elements in matrices: large enough that time is spent on them
FILM = replace(TIMED, bucket_size=1 << 20)  # of chapter 13: three waves of matrices, and an end of all the rest


def pixels(grid: Grid, context: int) -> Tensor:
    """Return the corpus [windows, context + 1] int64, cut from one long row of pictures. Collective.

    Rank 0 reads the pictures and broadcasts: see `digits.digits`.
    """
    import torch

    from distmuon.models.digits import DIGITS_PIXELS, DIGITS_ROWS, scanned

    table = torch.full((DIGITS_ROWS, 1 + DIGITS_PIXELS), NEW_PICTURE, device=grid.device)
    if grid.world.rank == 0:
        table[:, 1:] = scanned()[:, :DIGITS_PIXELS]
    row = grid.world.broadcast(table, "data").reshape(-1)
    windows = len(row) // (context + 1)
    return row[: windows * (context + 1)].view(windows, context + 1)


def batches(workload: Workload, corpus: Tensor, dp: int, dp_rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this DP rank's (inputs, targets), each [sequences / D, context], step by step, without end."""
    from distmuon.models.digits import batch_rows

    each, step = workload.sequences // dp, 0
    while True:
        rows = batch_rows(step, workload.sequences, len(corpus), workload.seed).to(corpus.device)
        mine = corpus[rows[dp_rank * each : (dp_rank + 1) * each]]
        yield mine[:, :-1], mine[:, 1:]
        step += 1
