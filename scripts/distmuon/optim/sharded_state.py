"""The state of a sharded optimizer: what it refuses, what all ranks must have alike, and how it is saved and loaded.

Nothing here moves a gradient. Every wrong thing is one sentence that names it and the remedy, before anything changes,
and on all ranks: one that raised alone would leave the others waiting in the next collective.

    {"state": {number of the parameter: {name: tensor}}, "param_groups": [...],     as in torch
     "place": the grid, the rank and the map that it belongs to, "steps": updates made}

Of a parameter, a rank keeps what belongs to its piece of n elements; of one that it owns nothing of, nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NoReturn, get_args

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from distmuon.optim.options import (
    check_complete,
    check_count,
    check_flag,
    check_number,
    check_options,
    options_of,
    plain,
    refuse_unknown,
)
from distmuon.optim.param_groups import refuse_meta
from distmuon.optim.states import (
    MASTER_WEIGHT,
    NAMES,
    CheckedState,
    asked_by_torchs_checkpoint,
    check_kept,
    check_maker,
    check_same_algorithm,
    check_shapes,
)
from distmuon.sharding.boxes import matrices_of
from distmuon.sharding.buffers import Piece, ShardedBuffers, specs_of
from distmuon.sharding.consistency import broadcast_values, check_same, check_values
from distmuon.sharding.gradients import GradientViews
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import Range, check_bucket_size, gradient_dtype
from distmuon.sharding.local_views import Boxes, LocalView, boxes_of_run, everything, over_tp
from distmuon.sharding.matrices import globalize
from distmuon.sharding.tensor_parallel import tp_split_dim
from distmuon.sharding.warning import warn_user

SHARDED = ("DistributedMuon", "Zero1AdamW")  # both keep the same of a parameter, if its algorithm is the same
NonFinite = Literal["raise", "skip"]
NON_FINITE_CHOICES = get_args(NonFinite)


class ShardedState(CheckedState):
    """The part of a sharded optimizer that refuses, saves and loads. A subclass sets these attributes."""

    FIXED: ClassVar = ("matrices",)  # by which the map is laid out

    grid: Grid
    buffers: ShardedBuffers
    gradient_views: GradientViews
    steps: int  # skipped ones apart
    max_norm: float | None
    on_nonfinite: str
    check_every: int
    overlap_forward: bool
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
        if (now := len(self.param_groups)) != (before := len(self._algorithms)):
            raise RuntimeError(
                f"the optimizer has {now} parameter group(s) and had {before} at construction; the virtual map is laid "
                "out once, so set them back, or make a new optimizer."
            )
        self._check_settings()
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
        group_of = [group for group in self.param_groups for _ in group["params"]]
        for piece in self._pieces():
            name, state = self.buffers.names[piece.index], self.state.get(self.buffers.parameters[piece.index], {})
            check_shapes(name, piece.weight, state, self._rows_kept(piece.index, group_of[piece.index]))

    def _check_settings(self) -> None:
        """Raise ValueError or TypeError for what anyone may set between two steps."""
        if self.on_nonfinite not in NON_FINITE_CHOICES:
            raise ValueError(f"on_nonfinite is {self.on_nonfinite!r}; choose one of {', '.join(NON_FINITE_CHOICES)}.")
        if self.max_norm is not None:
            check_max_norm(self.max_norm)
        if not isinstance(self.check_every, int) or self.check_every < 0:
            raise ValueError(f"check_every is {self.check_every!r}; give a number of steps, or 0 for never.")
        check_flag("overlap_forward", self.overlap_forward)

    def _check_arguments(self, bucket_size: int, broadcast: bool) -> None:
        self._check_settings()
        check_bucket_size(bucket_size)
        check_flag("broadcast", broadcast)
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
        # of groups that were added or taken away since, `_check_groups` says so
        for number, (group, algorithm) in enumerate(zip(self.param_groups, self._algorithms, strict=False)):
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

    # ---- Saved and loaded ---------------------------------------------------------------------------------

    def _would_overwrite(self) -> bool:
        """Say whether torch.distributed.checkpoint asks for one shard of several, which it takes for the whole."""
        return self.grid.dp.size * self.grid.tp.size > 1 and asked_by_torchs_checkpoint()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard of the state, and its place. No collective: any rank may call it alone.

        The model's own `state_dict` holds the parameters. Raises RuntimeError where torch.distributed.checkpoint asks
        on several ranks.
        """
        if self._would_overwrite():  # it takes plain tensors of one name for one tensor, also when it loads
            raise RuntimeError(
                f"torch.distributed.checkpoint would write one rank's shard of {type(self).__name__} over all others'; "
                "save and load with distmuon.checkpoint, or each rank's state_dict() in a file of its own."
            )
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned on the same rank of the same grid, with the same map.

        Parameters may have other names, but not each other's. Raises ValueError, saying what differs, for anything
        else: a shard of another map is not this rank's state.
        """
        super().load_state_dict(state_dict)

    def __getstate__(self) -> NoReturn:  # type: ignore[override]
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: it holds process groups, and parameters live in its "
            "buffers. Save its state_dict(), and make another optimizer for a copied model."
        )

    def list_masters(self) -> None:
        """List master weights that are not the parameters themselves in the state."""
        for piece in self._pieces():
            if self._has_master(piece):
                self.state[self.buffers.parameters[piece.index]][MASTER_WEIGHT] = piece.weight

    def local_views(self) -> list[LocalView]:
        """Return what this rank holds of every parameter, and keeps: a flat run of it, or nothing. No collective.

        Masters follow what somebody has written to a parameter.
        """
        self.buffers.refresh_masters()
        pieces = {piece.index: piece for piece in self._pieces()}
        latest = getattr(self, "statistics", None)  # there is none before the first step
        used = frozenset() if latest is None else latest.present
        return [self._view(index, pieces.get(index), index in used) for index, _ in enumerate(self.buffers.parameters)]

    def _view(self, index: int, piece: Piece | None, used: bool) -> LocalView:
        spec, tp, ns_dtype = self.buffers.layout.specs[index], self.grid.tp, self._ns_dtype(index)
        matrices = globalize(spec.matrices, spec.tp_split_dim, tp.size)
        run = Range(0, 0) if piece is None else piece.meta.range_in_param
        return LocalView(
            name=spec.name,
            parameter=self.buffers.parameters[index],
            shape=spec.full_shape(tp.size),
            held=over_tp(everything(spec.shape), spec, tp.size, tp.rank),
            values=None if piece is None else piece.weight,
            boxes=over_tp(boxes_of_run(spec.shape, run), spec, tp.size, tp.rank),
            dtype=getattr(torch, gradient_dtype(spec.dtype)),
            counted=spec.tp_split_dim is not None or tp.rank == 0,
            gradient=piece.gradient if piece is not None and used else None,
            matrices=matrices_of(matrices, spec.full_shape(tp.size)) if ns_dtype is not None else (),
            ns_dtype=ns_dtype,
            row_boxes=() if piece is None else self._rows_seen(index),
        )

    def _ns_dtype(self, index: int) -> torch.dtype | None:
        """Return in which dtype Newton–Schulz sees a parameter's matrices; None where it does not."""

    def _rows_kept(self, index: int, group: Mapping[str, Any]) -> int:
        """Return of how many rows NorMuon keeps something here under this group's options; 0 where it is off."""
        return 0 if group.get("normuon_beta2") is None else sum(run.size for _, run in self._rows_seen(index))

    def _rows_seen(self, index: int) -> Boxes:
        """Return which of the rows of a parameter's matrices this rank orthogonalizes; none where it does not."""
        return ()

    def _sign(self, state_dict: dict[str, Any]) -> None:
        super()._sign(state_dict)
        state_dict |= {"place": self._place(), "steps": self.steps}

    def _in_order(self, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
        if "place" not in state_dict:
            raise ValueError(
                "this is no state of a sharded optimizer, which knows its rank; train on from one that is."
            )
        groups = state_dict["param_groups"]
        check_maker(groups, self.MADE_BY, *SHARDED)
        saved, mine = state_dict["place"], self._place()
        check_count("steps in this state", state_dict.get("steps"), 0)
        if saved != mine:
            key = next(key for key in mine if saved.get(key) != mine[key])
            short = f": {saved.get(key)} instead of {mine[key]}" if key in ("grid", "rank") else ""
            raise ValueError(
                f"this state belongs elsewhere, it has another {key}{short}; load it where it was saved, "
                "on the same rank of the same grid, with the same parameters, bucket size and strategy."
            )
        theirs, ours = ([name for group in each for name in group[NAMES]] for each in (groups, self.param_groups))
        known = set(ours)
        for name, own in zip(theirs, ours, strict=True):
            if name != own and name in known:
                raise ValueError(
                    f"this state has {name!r} in the place of {own!r}: the same parameters in another order, "
                    "which are other shards; build the model and its groups in the order of the run that saved it."
                )
        states = [state_dict["state"].get(number, {}) for group in groups for number in group["params"]]
        trained: list[tuple[str, Mapping[str, Any]]] = []  # each parameter's algorithm, and its group as it was saved
        for own_group, group in zip(self.param_groups, groups, strict=True):
            trained += [(check_same_algorithm(self, own_group, group), group)] * len(own_group["params"])
        for piece in self._pieces():
            name, state = self.buffers.names[piece.index], states[piece.index]
            if self._has_master(piece) and MASTER_WEIGHT not in state:
                raise ValueError(
                    f"this state lacks the {MASTER_WEIGHT} of {name!r}, without which training would go on from "
                    "rounded weights; load the state as it was saved."
                )
            algorithm, group = trained[piece.index]
            check_kept(name, piece.weight, state, algorithm, self._rows_kept(piece.index, group))
        return [group | {NAMES: own[NAMES]} for own, group in zip(self.param_groups, groups, strict=True)]

    def _put_in(self, states: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
        for piece in self._pieces():
            state = dict(states[piece.index])
            if MASTER_WEIGHT in state:
                piece.weight.copy_(state.pop(MASTER_WEIGHT))
            device = piece.weight.device
            # a shard is float32 or wider, whatever the parameter is
            here = {k: value.to(value.device if k == "step" else device, copy=True) for k, value in state.items()}
            self.state[self.buffers.parameters[piece.index]].update(here)
        self.steps = state_dict["steps"]
        self.list_masters()

    def _pieces(self) -> Iterator[Piece]:
        return itertools.chain.from_iterable(self.buffers.pieces.values())

    def _has_master(self, piece: Piece) -> bool:
        return piece.weight.dtype != self.buffers.parameters[piece.index].dtype

    def _place(self) -> dict[str, Any]:
        layout, grid = self.buffers.layout, self.grid
        return {
            "grid": (grid.dp.size, grid.tp.size),
            "rank": (grid.dp.rank, grid.tp.rank),
            "set of parameters": [tuple(spec)[1:] for spec in layout.specs],  # whatever their names
            "division into groups": [(group["algorithm"], len(group["params"])) for group in self.param_groups],
            "global buffer size": layout.global_buffer_size,
            "map": [tuple(meta.local_range) for meta in self.buffers.metas],
        }


def refuse_inference_mode() -> None:
    if torch.is_inference_mode_enabled():
        raise RuntimeError("under torch.inference_mode nothing can be trained; use torch.no_grad, or leave it.")


def check_max_norm(max_norm: float | Tensor, norm_type: float = 2.0) -> float:
    """Return the bound as a number; raise ValueError for one that no norm can keep or another norm than the 2-norm,
    TypeError for one that is no number.
    """
    check_number("max_norm", max_norm)
    if not (limit := float(max_norm)) >= 0:
        raise ValueError(f"max_norm is {limit}; give 0 or more, or None to leave gradients as they are.")
    if norm_type != 2:
        raise ValueError(f"norm_type is {norm_type!r}; only the 2-norm is measured over all ranks: leave it out.")
    return limit


def refuse_nonfinite_norm(norm: float) -> None:
    """Raise RuntimeError, as torch's clipping does where that is asked for, if a norm is infinite or NaN."""
    if not math.isfinite(norm):
        raise RuntimeError(
            f"the norm of all gradients is {norm}, so they cannot be clipped, and nothing has changed; skip this batch "
            "with zero_grad(), or leave error_if_nonfinite out."
        )
