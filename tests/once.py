"""A function that is run once per arguments: many tests then ask what one world has found out."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def once(function: Callable[P, R]) -> Callable[P, R]:
    """Remember what `function` returned or raised: a world that fails is not started again for the next test."""

    @functools.cache
    def attempt(*args: P.args, **kwargs: P.kwargs) -> tuple[R | None, Exception | None]:
        try:
            return function(*args, **kwargs), None
        except Exception as error:
            return None, error

    @functools.wraps(function)
    def remembered(*args: P.args, **kwargs: P.kwargs) -> R:
        result, error = attempt(*args, **kwargs)  # type: ignore[arg-type]
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    return remembered
