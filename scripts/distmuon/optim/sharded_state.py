"""A rank's shard of an optimizer's state: what is in it, and how it is saved and loaded.

    {"state": {number of the parameter: {name: tensor}}, "param_groups": [...],     as in torch
     "place": the grid, the rank and the map that it belongs to, "steps": updates made}

Of a parameter, a rank keeps what belongs to its piece of n elements; of one that it owns nothing of, nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from distmuon.optim.states import MASTER_WEIGHT, NAMES, CheckedState, check_kept, check_maker, check_same_algorithm
from distmuon.sharding.boxes import matrices_of
from distmuon.sharding.buffers import Piece, ShardedBuffers
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import Range, gradient_dtype
from distmuon.sharding.local_views import LocalView, boxes_of_run, everything, over_tp
from distmuon.sharding.matrices import globalize

SHARDED = ("DistributedMuon", "Zero1AdamW")  # both keep the same of a parameter, if its algorithm is the same


class ShardedState(CheckedState):
    """The part of a sharded optimizer that saves and loads. A subclass sets `grid` and `buffers`."""

    grid: Grid
    buffers: ShardedBuffers
    steps: int  # updates made so far, skipped steps apart

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard of the state, and its place. No collective: any rank may call it alone.

        The model's own `state_dict` holds the parameters.
        """
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
        )

    def _ns_dtype(self, index: int) -> torch.dtype | None:
        """Return in which dtype Newton–Schulz sees a parameter's matrices; None where it does not."""

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
        algorithms: list[str] = []
        for own_group, group in zip(self.param_groups, groups, strict=True):
            algorithms += [check_same_algorithm(self, own_group, group)] * len(own_group["params"])
        for piece in self._pieces():
            name, state = self.buffers.names[piece.index], states[piece.index]
            if self._has_master(piece) and MASTER_WEIGHT not in state:
                raise ValueError(
                    f"this state lacks the {MASTER_WEIGHT} of {name!r}, without which training would go on from "
                    "rounded weights; load the state as it was saved."
                )
            check_kept(name, piece.weight, state, algorithms[piece.index])
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
