"""All that a training run depends on besides the grid, checked before anything is started."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distmuon.launch import UsageError
from distmuon.launch.cli import option_of
from distmuon.optim import strategies

if TYPE_CHECKING:  # not at run time: a wrong argument is answered without importing torch
    import torch

OPTIMIZERS = ("muon", "adamw")
DTYPES = ("float32", "bfloat16", "float64")
OVERLAP_NAMES = ("synchronous", "naive", "pipelined")  # of `optim.overlap`, which imports torch
TRAINING_ROWS = 1500  # digits; the other 297 are held out


@dataclass(frozen=True)
class Recipe:
    """A run of the small MLP on the digits.

    widths: features per layer, input and output included. batch: rows per step, over all ranks, cut into micro_batches
    of which every DP rank runs its share. bucket_size: elements. dtype: of the model; master weights are float32 or
    wider. lr, weight_decay: for Muon and AdamW alike, which the scale 0.2 sqrt(max(A, B)) makes possible.
    overlap: in which order the moves are made. publish: what the last of them sends.
    whole_every: of the strategy `periodic`: every so many steps it takes whole matrices. Others do not heed it.
    """

    widths: tuple[int, ...] = (64, 256, 128, 128, 10)
    steps: int = 30
    batch: int = 512
    micro_batches: int = 8
    optimizer: str = "muon"
    dtype: str = "float32"
    strategy: str = "gather_all"
    overlap: str = "synchronous"
    publish: str = "parameters"
    whole_every: int = 5
    lr: float = 0.01
    weight_decay: float = 0.1
    bucket_size: int = 16_384
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """The model's dtype."""
        import torch

        return getattr(torch, self.dtype)

    @property
    def gather_dtype(self) -> str:
        """The dtype, by name, in which the momentum travels: bf16, as in the paper, and float64 for float64 models."""
        return "float64" if self.dtype == "float64" else "bfloat16"

    @property
    def period(self) -> int:
        """Every so many steps take whole matrices: 1 but for Muon with the strategy `periodic`."""
        return self.whole_every if self.optimizer == "muon" and self.strategy == "periodic" else 1

    def check(self, dp: int, tp: int) -> Recipe:
        """Return the recipe if it fits a dp x tp grid; raise UsageError, naming the value and the remedy, if not."""
        known_values = {"optimizer": OPTIMIZERS, "dtype": DTYPES, "overlap": OVERLAP_NAMES}
        for name, known in (known_values | {"publish": strategies.PUBLISHED}).items():
            if getattr(self, name) not in known:
                raise UsageError(f"--{name} {getattr(self, name)} is unknown; choose one of {', '.join(known)}.")
        if wrong := strategies.complaint(self.strategy):
            raise UsageError(f"--strategy {self.strategy}: {wrong}.")
        if self.overlap != "synchronous" and not self._says("STARTS_UNREAD"):
            raise UsageError(
                f"--overlap {self.overlap} does not go with --strategy {self.strategy}, which reads what it gathers at "
                "once; take --strategy owner."
            )
        if self.publish == "updates" and (not self._says("OWN_BUCKETS") or self.dtype == "bfloat16"):
            raise UsageError(
                f"--publish updates does not go with --strategy {self.strategy} and --dtype {self.dtype}; take "
                "--strategy owner and a dtype of float32 or float64."
            )
        if not 0 < self.lr < float("inf"):
            raise UsageError(f"--lr {self.lr:g}: must be a positive number.")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed {self.seed}: must be from 0 to 2**63 - 1.")
        for name in ("steps", "batch", "micro_batches", "bucket_size", "whole_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{option_of(name)} {getattr(self, name)}: must be at least 1.")
        if dp > TRAINING_ROWS:
            raise UsageError(f"--dp {dp}: there are {TRAINING_ROWS} digits to share out; choose at most as many ranks.")
        remedy = f"choose for instance {self._fitting(max(dp, 1))}."
        if self.batch > TRAINING_ROWS:
            raise UsageError(f"--batch {self.batch} is more than the {TRAINING_ROWS} digits there are; {remedy}")
        if dp >= 1 and self.micro_batches % dp:
            raise UsageError(f"--micro-batches {self.micro_batches} cannot be shared out by --dp {dp} ranks; {remedy}")
        if self.batch % self.micro_batches:
            raise UsageError(f"--batch {self.batch} cannot be cut into {self.micro_batches} equal pieces; {remedy}")
        common = math.gcd(*self.widths[1:-2:2])  # column parallel layers: these features are cut
        if tp >= 1 and common % tp:
            fitting = ", ".join(str(t) for t in range(1, common + 1) if common % t == 0)
            raise UsageError(f"--tp {tp} does not divide the layers' {common} features; choose one of {fitting}.")
        return self

    def _says(self, fact: str) -> bool:
        """Return a fact of the strategy's class. Imports it, and torch: asked only where an option needs it."""
        try:
            return getattr(strategies.load(self.strategy), fact, False)
        except ValueError as error:
            raise UsageError(f"--strategy {self.strategy}: {error}") from error

    def shared_by(self, dp: int) -> Recipe:
        """Return this recipe with two micro-batches for each of `dp` ranks, and about as many rows as it had."""
        micro_batches = 2 * max(1, dp)
        return replace(self, micro_batches=micro_batches, batch=micro_batches * max(1, self.batch // micro_batches))

    def _fitting(self, dp: int) -> str:
        """Return the arguments nearest to this recipe that fit `dp` ranks, which are at most the rows there are."""

        def near(wanted: float, most: int) -> int:
            return max(1, min(round(wanted), most))

        micro_batches = dp * near(self.micro_batches / dp, TRAINING_ROWS // dp)
        batch = micro_batches * near(self.batch / micro_batches, TRAINING_ROWS // micro_batches)
        return f"--batch {batch} --micro-batches {micro_batches}"
