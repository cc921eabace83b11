"""What every rank runs for test_certify.py: the certificate of models, data and optimizers that are not ours."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from distmuon import DistributedMuon, Grid, Muon, MuonW, Zero1AdamW, certify, split_parameters
from distmuon.launch import World
from distmuon.models.networks import ALONE, Transformer, initial_weights
from distmuon.sharding.collectives import Group
from distmuon.sharding.layout import Bucket
from distmuon.sharding.tensor_parallel import load_slices

VOCABULARY, STEPS, ROWS = 11, 3, 8
TOKENS = torch.randint(VOCABULARY, (STEPS, ROWS, 5), generator=torch.Generator().manual_seed(1))
BATCHES = [(tokens, (tokens + 1) % VOCABULARY) for tokens in TOKENS]


class Found(NamedTuple):
    """What rank 0 sees of a certificate."""

    verdicts: dict[str, bool | None]
    page: str
    passed: bool


# ---- Models -----------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A block of torch's transformer between an embedding and a head that are one tensor. bias: of its layers."""

    def __init__(self, bias: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        options: dict[str, Any] = dict(activation="gelu", batch_first=True, norm_first=True, bias=bias)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.tokens(tokens)))


def cut(tp: Group = ALONE) -> Transformer:
    shape = (VOCABULARY, 16, 1, 4, 5)
    model = Transformer(*shape, tp=tp)
    load_slices(model, initial_weights(Transformer(*shape), 0), tp)
    return model


def pairs() -> nn.Module:
    inner = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), *inner, nn.Linear(8, VOCABULARY, bias=False))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.BatchNorm1d(5), nn.Linear(8, VOCABULARY))


GENERATOR = torch.Generator()


def unseeded() -> nn.Module:
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))
    nn.init.normal_(model[0].weight, generator=GENERATOR)  # type: ignore[arg-type]
    return model


# ---- Optimizers -------------------------------------------------------------------------------------------


def muon(kind: Callable[..., Any] = DistributedMuon, **options: Any) -> Callable[..., Any]:
    def make(model: nn.Module, grid: Grid, gather_dtype: torch.dtype | None = None) -> Any:
        given = {"lr": 0.02, "bucket_size": 500, "gather_dtype": gather_dtype} | options
        return kind(split_parameters(model), grid, **given)

    return make


def on_fsdp(kind: Callable[..., Any] = MuonW, **options: Any) -> Callable[..., Any]:
    def make(model: Tied, grid: Grid, gather_dtype: torch.dtype | None = None) -> Any:
        assert grid.mesh is not None
        fully_shard(model.block, mesh=grid.mesh["dp"])
        fully_shard(model, mesh=grid.mesh["dp"])
        return kind(model, lr=0.02, gather_dtype=gather_dtype, **options)

    return make


def on_fsdp_over_tp(model: nn.Sequential, grid: Grid, gather_dtype: torch.dtype | None = None) -> MuonW:
    assert grid.mesh is not None
    parallelize_module(model, grid.mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    fully_shard(model, mesh=grid.mesh["dp"])
    return MuonW(model, lr=0.02, gather_dtype=gather_dtype)


def under_ddp(model: nn.Module, grid: Grid, gather_dtype: torch.dtype | None = None) -> tuple[nn.Module, MuonW]:
    wrapped = DistributedDataParallel(model, process_group=grid.dp.process_group)
    return wrapped, MuonW(wrapped, lr=0.02, gather_dtype=gather_dtype)


def torch_adamw(model: nn.Module, grid: Grid) -> torch.optim.Optimizer:
    assert grid.mesh is not None
    fully_shard(model, mesh=grid.mesh["dp"])
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def alone(model: nn.Module, gather_dtype: torch.dtype | None = None) -> list[torch.optim.Optimizer]:
    """What one process should do, by somebody who knows: the momentum is rounded as it is where it travels."""
    hidden, rest = ([p for _, p in group["params"]] for group in split_parameters(model))
    given: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
    return [Muon(hidden, input_dtype=gather_dtype or torch.bfloat16, **given), torch.optim.AdamW(rest, **given)]


# ---- Mistakes ---------------------------------------------------------------------------------------------


class WrongScale(DistributedMuon):
    def apply(self, buckets: Any, updates: Mapping[int, Tensor]) -> None:
        super().apply(buckets, {index: 1.01 * update.double() for index, update in updates.items()})


class Stale(DistributedMuon):
    def all_gather(self, bucket: Bucket) -> None:
        super().all_gather(bucket)
        if self.grid.dp.rank == 1:
            self.buffers.parameters_of(bucket)[0].mul_(1.001)


class Talkative(DistributedMuon):
    def all_gather(self, bucket: Bucket) -> None:
        super().all_gather(bucket)
        self.grid.dp.all_reduce(torch.zeros(1), "something else")


class OneOwnerScaled(MuonW):
    def _orthogonalize(self, plan: Any, matrices: Any) -> Any:
        updates = super()._orthogonalize(plan, matrices)
        return {key: 1.01 * o if plan.group.rank == 1 else o for key, o in updates.items()}


# ---- What is certified, and what is refused ---------------------------------------------------------------

Case = tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]
SOUND: dict[str, Case] = {
    "DistributedMuon": (Tied, muon(max_norm=0.5), {"micro_batches": 2}),
    "a key's bias": (lambda: Tied(bias=True), muon(), {}),
    "bf16": (Tied, muon(strategy="owner"), {"dtype": torch.bfloat16}),
    "Zero1AdamW": (Tied, lambda model, grid: Zero1AdamW(model.named_parameters(), grid, lr=0.02), {}),
    "FSDP2": (Tied, on_fsdp(), {"micro_batches": 2}),
    "FSDP2, bf16": (Tied, on_fsdp(master_weights=True), {"dtype": torch.bfloat16}),
    "DDP": (Tied, under_ddp, {}),
    "torch's AdamW": (Tied, torch_adamw, {}),
    "a reference": (Tied, muon(), {"make_reference": alone}),
}
WRONG: dict[str, Case] = {
    "wrong scale": (Tied, muon(WrongScale), {}),
    "stale rank": (Tied, muon(Stale), {}),
    "talkative": (Tied, muon(Talkative), {}),
    "one owner": (Tied, on_fsdp(OneOwnerScaled), {}),
    "wrong rate": (Tied, muon(lr=0.021), {"make_reference": alone}),
}
OVER_TP: dict[str, Case] = {
    "DistributedMuon": (cut, muon(), {"micro_batches": 2}),
    "blockwise": (cut, muon(strategy="blockwise"), {}),
    "FSDP2": (pairs, on_fsdp_over_tp, {}),
}
REFUSED: dict[str, Case] = {
    "dropout": (lambda: Tied(dropout=0.5), muon(), {}),
    "statistics": (normalized, muon(), {}),
    "unseeded": (unseeded, muon(), {}),
    "sum": (Tied, muon(), {"loss": lambda model, batch: model(batch[0]).square().sum()}),
    "many": (Tied, muon(), {"loss": lambda model, batch: model(batch[0]).square()}),
    "no loss": (Tied, muon(), {"batches": TOKENS.unbind()}),
    "rows": (Tied, muon(), {"micro_batches": 3}),
    "none": (Tied, muon(), {"micro_batches": 0}),
    "text": (Tied, muon(), {"steps": "2"}),
    "a model": (Tied(), muon(), {}),
    "an optimizer": (Tied, cast("Any", torch.optim.SGD(Tied().parameters())), {}),
    "steps": (Tied, muon(), {"steps": 4}),
    "dtype": (Tied, muon(), {"dtype": torch.float16}),
    "stranger": (Tied, lambda model, grid: torch.optim.RMSprop(model.parameters()), {}),
    "several": (Tied, lambda model, grid: [torch.optim.SGD(model.parameters())], {}),
    "another model": (Tied, lambda model, grid: Zero1AdamW(Tied().parameters(), grid), {}),
    "no gather_dtype": (Tied, lambda model, grid: DistributedMuon(split_parameters(model), grid), {}),
    "no masters": (Tied, on_fsdp(), {"dtype": torch.bfloat16}),
    "ranks": (Tied, muon(), {"batches": None}),
}


def work(world: World, names: Mapping[str, Collection[str]]) -> dict[tuple[str, str], Any]:
    """Certify what stands under these names in the tables; return what was found, or the sentence, of each."""
    grid, found = Grid.of(world), dict[tuple[str, str], Any]()
    for table, name in ((table, name) for table, several in names.items() for name in several):
        make_model, make_optimizer, options = globals()[table][name]
        options = {"batches": BATCHES} | options
        if options["batches"] is None:
            options["batches"] = [(tokens.roll(world.rank, 0), targets) for tokens, targets in BATCHES]
        try:
            c = certify(make_model, options.pop("batches"), make_optimizer, grid, **options)
            found[table, name] = c and Found(c.verdicts, str(c), c.passed)
        except ValueError as error:
            found[table, name] = str(error)
    assert not list(grid.ledger)  # the caller's own, in which nothing of this belongs
    return found
