"""A rank's shard of an optimizer's state: what is in it, and how it is saved and loaded.

    {"state": {number of the parameter: {name: tensor}}, "param_groups": [...],     as in torch
     "place": the grid, the rank and the map that it belongs to, "steps": updates made}

Of a parameter, a rank keeps what belongs to its piece of n elements; of one that it owns nothing of, nothing.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch

from distmuon.sharding.buffers import ShardedBuffers
from distmuon.sharding.grid import Grid


class ShardedState(torch.optim.Optimizer):
    """The part of a sharded optimizer that saves and loads. It does so in torch's own hooks: others may hang theirs on.

    A subclass sets `grid` and `buffers`, then calls `save_by_shard`.
    """

    grid: Grid
    buffers: ShardedBuffers
    steps: int  # updates made so far, skipped steps apart

    def save_by_shard(self) -> None:
        """Let `state_dict` and `load_state_dict` deal in shards from now on."""
        self._groups = self.param_groups
        self._list_masters()
        self.register_state_dict_post_hook(_add_place, prepend=True)
        self.register_load_state_dict_post_hook(_take_state, prepend=True)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard of the state, and its place. No collective: any rank may call it alone.

        The model's own `state_dict` holds the parameters.
        """
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned on the same rank of the same grid, with the same map, under any names.

        Raises ValueError, saying what differs, for anything else: a shard of another map is not this rank's state.
        """
        last = self.register_load_state_dict_pre_hook(_set_state_aside)  # after those of others, who may change it
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()

    def __getstate__(self) -> NoReturn:  # type: ignore[override]
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: it holds process groups, and parameters live in its "
            "buffers. Save its state_dict(), and make another optimizer for a copied model."
        )

    def _list_masters(self) -> None:
        """List master weights that are not the parameters themselves in the state."""
        for pieces in self.buffers.pieces.values():
            for piece in pieces:
                parameter = self.buffers.parameters[piece.index]
                if piece.weight.dtype != parameter.dtype:
                    self.state[parameter]["master_weight"] = piece.weight

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


# ---- The hooks --------------------------------------------------------------------------------------------


def _add_place(optimizer: Any, state_dict: dict[str, Any]) -> None:
    state_dict |= {"place": optimizer._place(), "steps": optimizer.steps}


def _set_state_aside(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Check where the state belongs; keep it from torch, which would round it to the parameters' dtype."""
    if "place" not in state_dict:
        raise ValueError("this is no state of a sharded optimizer, which knows its rank; train on from one that is.")
    saved, mine = state_dict["place"], optimizer._place()
    if saved != mine:
        key = next(key for key in mine if saved.get(key) != mine[key])
        short = f": {saved.get(key)} instead of {mine[key]}" if key in ("grid", "rank") else ""
        raise ValueError(
            f"this state belongs elsewhere, it has another {key}{short}; load it where it was saved, "
            "on the same rank of the same grid, with the same parameters, bucket size and strategy."
        )
    for group in state_dict["param_groups"]:
        if missing := [name for name in optimizer.DEFAULTS[group["algorithm"]] if name not in group]:
            raise ValueError(f"a group of this state lacks {', '.join(missing)}; load one that was saved here.")
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]  # in the order of the map
    states = [copy.deepcopy(state_dict["state"].get(number, {})) for number in numbers]
    optimizer._incoming = states, state_dict["steps"]
    return state_dict | {"state": {}}


def _take_state(optimizer: Any) -> None:
    """Put the state in, and the options into the groups that everybody holds: torch has made new ones."""
    for group, loaded in zip(optimizer._groups, optimizer.param_groups, strict=True):
        kept = {name: group[name] for name in ("params", "param_names")}
        group.clear()
        group.update(loaded | kept)
    optimizer.param_groups = optimizer._groups
    states, optimizer.steps = optimizer._incoming
    for pieces in optimizer.buffers.pieces.values():
        for piece in pieces:
            state = states[piece.index]
            if "master_weight" in state:
                piece.weight.copy_(state.pop("master_weight"))
            here = {name: value if name == "step" else value.to(piece.weight.device) for name, value in state.items()}
            optimizer.state[optimizer.buffers.parameters[piece.index]].update(here)
    optimizer._list_masters()
    del optimizer._incoming
