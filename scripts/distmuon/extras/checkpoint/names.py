"""Names of a model's tensors without what wrappers add to them: the same for a plain, compiled or wrapped model.

blocks.0.up.weight      of torch.compile: _orig_mod.blocks.0.up.weight; of DistributedDataParallel: module.blocks...
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from distmuon.optim.states import PARALLEL, WRAPPERS


def plain_names(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Return {name that the model gives: plain name}. Raises ValueError where two would become one."""
    parallel = {
        f"{at}.{PARALLEL}".removeprefix(".")
        for at, module in model.named_modules()
        if isinstance(module, DataParallel | DistributedDataParallel)
    }
    found = {}
    for name in names:
        parts = name.split(".")
        paths = [".".join(parts[: i + 1]) for i in range(len(parts))]
        found[name] = ".".join(
            part for part, path in zip(parts, paths, strict=True) if part not in WRAPPERS and path not in parallel
        )
    if len(set(found.values())) < len(found):
        double = next(name for name in found.values() if list(found.values()).count(name) > 1)
        raise ValueError(f"two tensors of the model are called {double!r} without their wrappers; rename a module.")
    return found
