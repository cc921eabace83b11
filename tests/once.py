"""A function that is run once per arguments: many tests then ask what one world has found out."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import pytest

P = ParamSpec("P")
R = TypeVar("R")


def once(function: Callable[P, R]) -> Callable[P, R]:
    """Remember what `function` returned or raised: a world that fails is not started again for the next test.

    A skip, which is no Exception, is remembered like any other.
    """

    @functools.cache
    def attempt(*args: P.args, **kwargs: P.kwargs) -> tuple[R | None, BaseException | None]:
        try:
            return function(*args, **kwargs), None
        except (Exception, pytest.skip.Exception) as error:
            return None, error

    @functools.wraps(function)
    def remembered(*args: P.args, **kwargs: P.kwargs) -> R:
        result, error = attempt(*args, **kwargs)  # type: ignore[arg-type]
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    return remembered
