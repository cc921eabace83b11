"""Lists of tensors: one call for all of them where that is the same, because a GPU charges the host for every call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from distmuon.sharding.precision import is_narrow

Item = TypeVar("Item")


def each(operation: str, tensors: list[Tensor], *given: Any, **options: Any) -> list[Tensor]:
    """Call a tensor's operation for each of these, with lists and numbers: at once where that is the same.

    It is not the same for subclasses, which torch's optimizers leave out, too, nor in bf16 on a CPU, where
    `_foreach_mul_` rounds the factor to bf16 first.
    """
    lists = [tensors, *(one for one in given if isinstance(one, list))]
    plain = all(map(_is_plain, (tensor for one in lists for tensor in one)))
    if tensors and plain and (tensors[0].is_cuda or not is_narrow(tensors[0])):
        return list(getattr(torch, f"_foreach_{operation}")(tensors, *given, **options) or tensors)
    columns = [one if isinstance(one, list) else [one] * len(tensors) for one in given]
    return [getattr(tensor, operation)(*row, **options) for tensor, *row in zip(tensors, *columns, strict=True)]


def copy_each_(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy in pairs (to, from), whatever dtypes they have. No two of the former may overlap, nor lie in the latter."""
    alike: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}  # on a GPU some of torch look at the first one's alone
    for pair in pairs:
        alike.setdefault(pair[0].dtype, []).append(pair)
    for same in alike.values():
        torch._foreach_copy_([to for to, _ in same], [of for _, of in same])


def cast(
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
) -> list[Tensor]:  # as the tensors
    """Return the tensors in a dtype, themselves where they are in it."""
    found = [tensor if tensor.dtype == dtype else torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    copy_each_((new, old) for new, old in zip(found, tensors, strict=True) if new is not old)
    return found


def apart(tensors: Sequence[Tensor]) -> bool:
    """Return whether all of these are plain and in storages of their own, so that none is changed by writing another.

    Those that are not take their step one after the other: each then begins where the one before has ended.
    """
    if not all(map(_is_plain, tensors)):
        return False
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()]
    return len(set(places)) == len(places)


def places_by(keys: Iterable[Any]) -> Iterable[tuple[Any, list[int]]]:
    """Return the places of each key among the keys."""
    by_key: dict[Any, list[int]] = {}
    for place, key in enumerate(keys):
        by_key.setdefault(key, []).append(place)
    return by_key.items()


def runs(items: Sequence[Item], sizes: Sequence[int], room: float) -> Iterator[list[Item]]:
    """Yield runs of the items, in order, as long as there is room for the sum of their sizes, or of one item."""
    run, taken = list[Item](), 0
    for item, size in zip(items, sizes, strict=True):
        if run and taken + size > room:
            yield run
            run, taken = [], 0
        run.append(item)
        taken += size
    if run:
        yield run


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)
