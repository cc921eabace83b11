"""What a group says when a step begins: schedulers, users and loaded states write to it between two steps."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

NEARLY = 0.88  # how alike a typo and the option that was meant are, by difflib's ratio: beta and betas are at 0.89


def check_complete(group: Mapping[str, Any], defaults: Mapping[str, Iterable[str]], who: str) -> None:
    """Raise ValueError unless a group has all options of its algorithm, and none that looks like a typo of one.

    defaults: the options of each algorithm. A group may hold whatever else its user keeps there, as torch has it.
    """
    algorithm = group.get("algorithm", "")
    if algorithm not in defaults:
        raise ValueError(f"a group has algorithm={algorithm!r}; {who} runs {' or '.join(map(repr, defaults))}.")
    options = [*defaults[algorithm], "algorithm"]
    if missing := [name for name in options if name not in group]:
        raise ValueError(
            f"a group with algorithm={algorithm!r} lacks {', '.join(missing)}; set them too, or make a new optimizer."
        )
    for name in group.keys() - {*options}:
        if meant := _nearest(name, tuple(options)):
            raise ValueError(f"a group has the option {name!r}, which nothing reads; write {meant!r} if that is meant.")


def check_one_number(name: str, value: Any) -> None:
    """Raise ValueError for an option that is a tensor of several elements."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name} is a tensor of {value.numel()} elements; give one.")


def plain(option: Any) -> Any:
    """Return an option as a number, or numbers, where it is a tensor."""
    return option.tolist() if isinstance(option, Tensor) else option


@functools.cache
def _nearest(name: str, options: tuple[str, ...]) -> str | None:
    return next(iter(difflib.get_close_matches(name, options, 1, NEARLY)), None)
