"""What a sharded optimizer refuses, and whether all ranks ask for the same: at construction, and in every step.

Nothing here moves a gradient. Every wrong thing is one sentence that names it and the remedy, before anything changes,
and on all ranks: one that raised alone would leave the others waiting in the next collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from distmuon.optim.options import check_complete, check_options, options_of, plain, refuse_unknown
from distmuon.optim.param_groups import refuse_meta
from distmuon.optim.sharded_state import ShardedState
from distmuon.sharding.buffers import specs_of
from distmuon.sharding.consistency import broadcast_values, check_same, check_values
from distmuon.sharding.gradients import GradientViews
from distmuon.sharding.tensor_parallel import tp_split_dim
from distmuon.sharding.warning import warn_user

NonFinite = Literal["raise", "skip"]
NON_FINITE_CHOICES = get_args(NonFinite)


class ShardedChecks(ShardedState):
    """The part of a sharded optimizer that refuses. A subclass has the options that are checked here as attributes."""

    gradient_views: GradientViews
    max_norm: float | None
    on_nonfinite: str
    check_every: int
    _options: dict[str, Any]
    _algorithms: list[str]  # of the groups, at construction
    _choices: tuple[tuple[str, str], ...] = ()  # what else ranks are to have alike: (name, value)
    _warned = False

    def _named(self) -> list[tuple[str, Any]]:
        return [pair for g in self.param_groups for pair in zip(g["param_names"], g["params"], strict=True)]

    def _check_options(self, group: Mapping[str, Any]) -> None:
        check_options(group)

    def _check_groups(self) -> None:
        """Raise an error for what was written to the groups since construction, by hand or by a scheduler."""
        for group, algorithm in zip(self.param_groups, self._algorithms, strict=True):
            check_complete(group, self.DEFAULTS, type(self).__name__)
            if group["algorithm"] != algorithm:
                raise ValueError(
                    f"the algorithm of a group is {group['algorithm']!r} and was {algorithm!r}; the virtual map is "
                    "laid out once, so set it back, or make a new optimizer."
                )
            self._check_options(group)
        if [id(p) for g in self.param_groups for p in g["params"]] != [*map(id, self.buffers.parameters)]:
            raise RuntimeError("the groups hold other parameters than at construction; make a new optimizer.")

    def _check_arguments(self) -> None:
        if self.on_nonfinite not in NON_FINITE_CHOICES:
            raise ValueError(f"on_nonfinite is {self.on_nonfinite!r}; choose one of {', '.join(NON_FINITE_CHOICES)}.")
        if self.max_norm is not None:
            check_max_norm(self.max_norm)
        if not isinstance(self.check_every, int) or self.check_every < 0:
            raise ValueError(f"check_every is {self.check_every!r}; give a number of steps, or 0 for never.")
        refuse_unknown(self._options, options_of(self.DEFAULTS), type(self).__name__)
        refuse_inference_mode()
        self.grid.check_beyond(max_norm=self.max_norm is not None, on_nonfinite=self.on_nonfinite == "skip")

    def _name_parameters(self, group: dict[str, Any]) -> None:
        """Make (name, parameter) pairs of the group's parameters; refuse what cannot be laid out.

        torch wants names from all groups or from none. What is wrong with the group otherwise, torch will say.
        """
        if isinstance(group["params"], set):
            return
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        names = group.pop("param_names", None) or [f"group{len(self.param_groups)}.{i}" for i in range(len(params))]
        if not any(isinstance(p, tuple) for p in params):
            params = list(zip(names, params, strict=True))
        group |= {"params": params, "param_names": []}
        first = {id(p): name for g in self.param_groups for name, p in zip(g["param_names"], g["params"], strict=True)}
        for name, p in [pair for pair in params if isinstance(pair, tuple) and isinstance(pair[1], Tensor)]:
            if id(p) in first:
                raise ValueError(f"parameter {name!r} is given twice (also as {first[id(p)]!r}); give it once.")
            first[id(p)] = name
            if is_lazy(p):
                raise ValueError(f"parameter {name!r} has no shape yet; let the model run once before.")
            if getattr(p, "tp_size", self.grid.tp.size) != self.grid.tp.size:
                raise ValueError(
                    f"parameter {name!r} belongs to a layer cut over {p.tp_size} TP ranks, but the grid has "  # type: ignore[attr-defined]
                    f"{self.grid.tp.size}; make both of one mesh."
                )
            if type(p.data) is not Tensor:
                raise ValueError(
                    f"parameter {name!r} is a {type(p.data).__name__}; the virtual map takes plain tensors, TP-local: "
                    "give DTensors to MuonW."
                )
            refuse_meta(name, p)
            if self.grid.tp.size > 1 and not hasattr(p, "tp_split_dim"):
                raise ValueError(
                    f"parameter {name!r} does not say how it is cut over TP, and a wrong guess would go unnoticed; "
                    "mark it (tensor_parallel.mark or mark_replicated). copy.deepcopy and to_empty lose marks."
                )

    # ---- Agreement between ranks --------------------------------------------------------------------------

    def _agree_at_start(self, bucket_size: int, broadcast: bool) -> None:
        """Raise RankMismatchError on all ranks unless they can be one model; all ranks or none goes on. Collective."""
        named = self._named()
        lines = [("optimizer", type(self).__name__), ("bucket_size", str(bucket_size)), ("broadcast", str(broadcast))]
        lines += [*self._choices, *self._options_now(self.max_norm)]
        check_same(self.grid, "options", lines, "give every rank the same")
        in_group = [number for number, group in enumerate(self.param_groups) for _ in group["params"]]
        parameters = []
        for spec, (_, p), number in zip(specs_of(named), named, in_group, strict=True):
            where = f"cut over TP along {spec.tp_split_dim}, in group {number}"
            trained = "trained" if p.requires_grad else "frozen"
            parameters.append((spec.name, f"{list(spec.shape)} {spec.dtype}, {where}, {trained}"))
        check_same(self.grid, "parameters", parameters, "build the same model, in the same order, on every rank")
        if broadcast:
            broadcast_values(self.grid, *self._replicas())
        else:
            self._check_values("begin alike, or pass broadcast=True")

    def _step_now(self, max_norm: float | None) -> list[tuple[str, Any]]:
        """Return what pipeline stages must have alike in a step."""
        return [("step", self.steps), ("max_norm", max_norm), ("on_nonfinite", self.on_nonfinite)]

    def _options_now(self, max_norm: float | None) -> list[tuple[str, str]]:
        """Return what must be alike on all ranks in a step, line by line; schedulers' notes are no options."""
        mine = dict(self._step_now(max_norm)) | {"check_every": self.check_every}
        for number, group in enumerate(self.param_groups):
            algorithm = self._algorithms[number]
            names = ("algorithm", *self.DEFAULTS[algorithm], *({"momentum"} & group.keys()))
            mine |= {f"{name} of group {number}": plain(group.get(name)) for name in names}
        return [(name, repr(value)) for name, value in mine.items()]

    def _check_values(self, remedy: str) -> None:
        check_values(self.grid, [name for name, _ in self._named()], *self._replicas(), remedy)

    def _replicas(self) -> tuple[list[Any], list[bool]]:
        """Return the parameters, and which of them are the same on all TP ranks."""
        tensors = [p for _, p in self._named()]
        return tensors, [tp_split_dim(p) is None for p in tensors]

    def _warn_of_local_clipping(self) -> None:
        """Warn, once, where gradients were written to after backward, as torch's clipping does."""
        if self.grid.world.size > 1 and not self._warned and self.gradient_views.changed_since_backward():
            self._warned = True
            warn_user(
                "gradients were changed in place after backward, where they are still this rank's own. If that was "
                "torch's clip_grad_norm_, it did not see the global norm: call the optimizer's clip_grad_norm_ or "
                "give it max_norm. DistributedDataParallel around the model does it too, and is not needed here.",
            )


def refuse_inference_mode() -> None:
    if torch.is_inference_mode_enabled():
        raise RuntimeError("under torch.inference_mode nothing can be trained; use torch.no_grad, or leave it.")


def check_max_norm(max_norm: float) -> None:
    """Raise ValueError for a bound that no norm can keep."""
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm}; give 0 or more, or None to leave gradients as they are.")
