"""A second, independent count: every collective that torch dispatches on this thread, whoever called it.

The ledger records what our code says it sends. This counter sits below it, in torch's dispatcher, and sees what was
really called: ours, DTensor's, FSDP2's. Tests hold the two against each other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distmuon.sharding.ledger import OPERATORS, WITHOUT_PAYLOAD, Ledger


class CollectiveCounter(TorchDispatchMode):
    """Context manager; `ledger` then holds one row per (collective, group), the label being torch's operator.

    Groups are named by their description ("dp", "tp"; "world" for the default group).
    Raises RuntimeError on a collective that it does not know, because a silent gap would make every count worthless.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: it calls collectives, and this mode would be off while it does
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if func.namespace in ("c10d", "_c10d_functional") and name not in WITHOUT_PAYLOAD:
            if name not in OPERATORS:
                raise RuntimeError(f"the collective counter does not know {name}; add it to ledger.OPERATORS.")
            given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
            given |= kwargs or {}
            op, payload = OPERATORS[name]
            group = _process_group(given)
            tensors = [t for t in tree_leaves(given.get(payload, result)) if isinstance(t, Tensor)]
            size = sum(t.numel() * t.element_size() for t in tensors)
            sent = size if op == "send" else None
            if splits := given.get("input_split_sizes"):  # of an all-to-all: what is for itself is not sent
                sent = (sum(splits) - splits[group.rank()]) * tensors[0].element_size()
            self.ledger.record(op, _group_name(group), group.size(), size, name, sent_bytes=sent)
        return result


def _process_group(arguments: dict[str, Any]) -> Any:
    if "process_group" in arguments:
        return dist.ProcessGroup.unbox(arguments["process_group"])
    return torch._C._distributed_c10d._resolve_process_group(arguments["group_name"])


def _group_name(group: Any) -> str:
    return "world" if group.group_desc == "default_pg" else group.group_desc
