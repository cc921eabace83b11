"""An optimizer under test, as it describes itself: what one process steps with in its place, and what it should send.

Groups, options and dtypes are read off the sharded optimizer, by the names of the parameters; the arithmetic is that of
plain single-device code, `muon.Muon` and `torch.optim.AdamW`, which knows of no map, no shard and no group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from distmuon.optim import strategies
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.muon import Muon
from distmuon.optim.muonw import MuonW
from distmuon.optim.options import ADAMW_DEFAULTS, GROUP_NOTES, MUON_DEFAULTS
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.optim.strategies.periodic import is_whole
from distmuon.sharding.buffers import dtype_name
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.precision import default_gather_dtype, is_narrow
from distmuon.verify.blocks import BlockMuon, block_options
from distmuon.verify.prediction import predict_step

ELEMENTWISE = (torch.optim.AdamW, torch.optim.SGD)  # to these a shard is as good as a matrix


class ReferenceGroup(NamedTuple):
    """Parameters by name, the class that steps them in one process, and its options."""

    names: tuple[str, ...]
    kind: type[torch.optim.Optimizer]
    options: dict[str, Any]


@dataclass(frozen=True)
class Blueprint:
    """What one process steps with.

    gather_dtype: in which Newton–Schulz sees the momentum; None: bf16, and float64 for float64 parameters.
    max_norm: to which the gradients' global norm is clipped; None: not at all.
    period: every so many steps take whole matrices: 1 but with the strategy `periodic`.
    make: instead of the groups, whole model -> an optimizer or several; may take a `gather_dtype`.
    """

    groups: tuple[ReferenceGroup, ...] = ()
    gather_dtype: torch.dtype | None = None
    max_norm: float | None = None
    period: int = 1
    make: Callable[..., Any] | None = None

    @classmethod
    def of(cls, optimizer: Any, model: nn.Module, tp: int) -> Blueprint:
        """Read an optimizer of this model over T = `tp`; ValueError, with the remedy, where that cannot be done."""
        if not isinstance(optimizer, (ShardedOptimizer, MuonW, *ELEMENTWISE)):
            raise ValueError(
                f"make_optimizer returns {type(optimizer).__name__}, of which we do not know what one process would "
                "do; give make_reference(model), which returns the optimizer of a whole model in one process."
            )
        names = {p: name for name, p in model.named_parameters()}
        groups = []
        for group in optimizer.param_groups:
            if strangers := [tuple(p.shape) for p in group["params"] if p not in names]:
                raise ValueError(
                    f"the optimizer trains a parameter of {strangers[0]} that is not in the model that it was made "
                    "for; give it parameters of that model."
                )
            groups.append(ReferenceGroup(tuple(names[p] for p in group["params"]), *_twin(optimizer, group, tp)))
        gather_dtype = optimizer.gather_dtype if isinstance(optimizer, MuonW) else None
        if isinstance(optimizer, DistributedMuon):
            gather_dtype = optimizer.strategy.context.gather_dtype
        period = max(group.get("whole_every", 1) for group in optimizer.param_groups)
        return cls(tuple(groups), gather_dtype, getattr(optimizer, "max_norm", None), period)

    @property
    def has_muon(self) -> bool:
        """Whether momentum travels, in a dtype that can be asked for."""
        return any(issubclass(group.kind, Muon) for group in self.groups) or (
            self.make is not None and accepts(self.make, "gather_dtype")
        )

    @property
    def as_muon(self) -> Blueprint | None:
        """The same with Muon, where it is another optimizer; None where it is not."""
        plain = [
            group._replace(kind=Muon, options={name: group.options[name] for name in MUON_DEFAULTS})
            if group.kind is BlockMuon
            else group
            for group in self.groups
        ]
        return replace(self, groups=tuple(plain)) if plain != list(self.groups) else None

    def rounds(self, dtype: torch.dtype) -> bool:
        """Say whether the momentum of a model of this dtype is rounded to bf16 on its way."""
        return self.has_muon and self._gather_dtype(dtype).itemsize < 4

    def optimizers(
        self, model: nn.Module, wire: torch.dtype | None, exact: bool
    ) -> Sequence[torch.optim.Optimizer]:  # of a whole model, whose parameters are their own masters
        """Make the optimizers. wire: as in `Problem`. exact: one matrix after the other."""
        parameters = dict(model.named_parameters())
        made: list[Any] = []
        if self.make is not None:
            one = self.make(model, **({} if wire is None else {"gather_dtype": wire}))
            made = list(one) if isinstance(one, list | tuple) else [one]
        for names, kind, options in self.groups:
            if issubclass(kind, Muon):
                dtype = wire or self._gather_dtype(parameters[names[0]].dtype)
                options = options | {"input_dtype": dtype}
            made.append(kind([(name, parameters[name]) for name in names], **options))
        for optimizer in made:
            if wire is not None:
                set_option(optimizer, "compute_dtype", wire)
            if exact:
                set_option(optimizer, "batched", False)
        return made

    def _gather_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.gather_dtype or default_gather_dtype(dtype)


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Say whether a function takes an argument of this name."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind == p.VAR_KEYWORD for p in parameters.values())


def set_option(optimizer: Any, name: str, value: Any) -> None:
    """Set an option of all groups that have it: our optimizers read their groups anew in every step."""
    for group in optimizer.param_groups:
        if name in group:
            group[name] = value


def predict_steps(optimizer: Any, steps: int) -> Ledger | None:
    """Return the ledger that a new optimizer's first steps will fill on this rank; None: of it nothing is predicted.

    Assumes that every parameter has a gradient.
    """
    if not isinstance(optimizer, ShardedOptimizer):
        return None
    grid, muon = optimizer.grid, getattr(optimizer, "muon", {})
    layout, ledger = optimizer.buffers.layout, Ledger()
    where: dict[str, Any] = {"dp_rank": grid.dp.rank, "tp_rank": grid.tp.rank, "muon": tuple(muon)}
    if isinstance(optimizer, DistributedMuon):
        gather_dtype, name = optimizer.strategy.context.gather_dtype, _strategy_of(optimizer)
        if not strategies.has_costs(name):
            return None
        where |= {"strategy": name, "gather_dtype": gather_dtype and dtype_name(gather_dtype)}
    for number in range(steps):
        whole = [i for i, group in muon.items() if is_whole(number, group.get("whole_every", 1))]
        every = len(whole) == len(muon)
        ledger.add(predict_step(layout, grid.tp.size, whole=None if every else whole, **where))
    return ledger


def _twin(
    optimizer: Any, group: dict[str, Any], tp: int
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:  # class, options
    """Return what does in one process what an optimizer does to one of its groups."""
    if isinstance(optimizer, ELEMENTWISE):
        given = {name: value for name, value in group.items() if name not in (*GROUP_NOTES, "decoupled_weight_decay")}
        return next(kind for kind in ELEMENTWISE if isinstance(optimizer, kind)), given
    if isinstance(optimizer, MuonW) and not optimizer.master_weights and any(map(is_narrow, group["params"])):
        raise ValueError(
            "MuonW rounds these bfloat16 parameters in every step, as torch.optim.AdamW in one process would not; pass "
            "master_weights=True, certify with dtype=torch.float32, or give make_reference(model)."
        )
    if group["algorithm"] == "adamw":
        return torch.optim.AdamW, {name: group[name] for name in ADAMW_DEFAULTS}
    options = {name: group[name] for name in MUON_DEFAULTS}
    blocks = block_options(_strategy_of(optimizer), group, tp) if isinstance(optimizer, DistributedMuon) else None
    return (Muon, options) if blocks is None else (BlockMuon, options | blocks)


def _strategy_of(optimizer: DistributedMuon) -> str:
    """Return the name of the strategy; "" for one from a file of its own."""
    return next((name for name in strategies.names() if strategies.load(name) is optimizer._chosen), "")
