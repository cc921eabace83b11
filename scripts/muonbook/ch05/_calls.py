"""A count of everything that is asked of torch.distributed, sends and receives included."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Context manager; `names` then holds how often each operator of torch.distributed was called on this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))
