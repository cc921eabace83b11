"""Products of bf16 matrices as a unit for bf16 makes them: summed in float32 and rounded once.

torch has them so where oneDNN makes them, from AVX-512 on; elsewhere a loop of its own takes a hundred times as long.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.bmm, aten.addmm, aten.baddbmm)
SLOW = not torch.ops.mkldnn._is_mkldnn_bf16_supported()


class WideProducts(TorchDispatchMode):
    """Inside, where bf16 is slow on this processor, float32 stands in for it in products."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not SLOW or func.overloadpacket not in PRODUCTS or args[0].dtype != torch.bfloat16:
            return func(*args, **kwargs)
        out = kwargs.pop("out", None)
        wide = [each.float() if isinstance(each, Tensor) else each for each in args]
        found = func.overloadpacket(*wide, **kwargs).bfloat16()
        return found if out is None else out.copy_(found)
