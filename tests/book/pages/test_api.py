"""The API reference: every public name is on it, with an example that runs, and docstrings become what they mean."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import api_reference
import pytest

import distmuon
from distmuon.optim.sharded_optimizer import ShardedOptimizer

PAGE = (Path(__file__).resolve().parents[3] / api_reference.PAGE).read_text(encoding="utf-8")
MODULES = ["distmuon", "distmuon.checkpoint", "distmuon.launch", "distmuon.metrics"]
OPTIMIZERS = ["DistributedMuon", "Muon", "MuonW", "Zero1AdamW"]
METHODS = ["step", "clip_grad_norm_", "state_dict", "load_state_dict", "add_param_group", "scale_rows_"]


def blocks() -> dict[str, str]:
    """Return what stands on the page of each name: its directive, options and example."""
    found = re.split(r"^(?=\.\. auto)|^```", PAGE, flags=re.MULTILINE)
    return {api_reference.entries(block)[0]: block for block in found if api_reference.entries(block)}


def thing(name: str) -> Any:
    """Return what has this full name."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last) if module else importlib.import_module(name)


def public() -> dict[str, Any]:
    """Return all that users may import, {full name: what it is}; modules stand for the names in them."""
    found = {f"{module}.{name}": thing(f"{module}.{name}") for module in MODULES for name in thing(module).__all__}
    return {name: value for name, value in found.items() if not isinstance(value, ModuleType)}


def test_the_modules_that_are_exported_are_those_whose_names_are_looked_up() -> None:
    exported = [name for name in distmuon.__all__ if isinstance(getattr(distmuon, name), ModuleType)]
    assert [f"distmuon.{name}" for name in exported] == MODULES[1:]


def test_every_public_name_is_on_the_page_once() -> None:
    names = api_reference.entries(PAGE)
    assert len(names) == len(set(names))
    documented = [thing(name) for name in names]
    missing = [name for name, value in public().items() if sum(value is one for one in documented) != 1]
    assert missing == []


def test_every_public_name_has_an_example() -> None:
    examples = [thing(name) for name, block in blocks().items() if ">>> " in block]
    assert [name for name, value in public().items() if not any(value is one for one in examples)] == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_users_call_of_an_optimizer_is_on_the_page(optimizer: str) -> None:
    kind = getattr(distmuon, optimizer)
    shared = blocks()["distmuon.optim.sharded_optimizer.ShardedOptimizer"] if issubclass(kind, ShardedOptimizer) else ""
    (listed,) = re.findall(r":members: (.*)", shared or blocks()[f"distmuon.{optimizer}"])
    assert {name for name in METHODS if hasattr(kind, name)} <= set(listed.split(", "))


@pytest.mark.parametrize("name", [name for name, block in blocks().items() if ">>> " in block])
def test_an_example_prints_what_the_page_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(blocks()[name], {"__name__": "example"}, name, None, None)
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert example.examples
    assert "".join(said) == ""


DOCSTRING = """Clip the norm of `p`, as `MuonW` does with
norm: not "all", nor kind="sum" or --some; see clip_grad_norm_ and *args.

    clip(p)

    clip(q)

lr to eps: of the groups, as
    `Muon` has them, or with
    none: one of:
    step, time: numbers
    table       the values of |x|
                in rows
Raises ValueError: never.
"""


def test_a_docstring_becomes_paragraphs_code_and_definitions() -> None:
    links = {"MuonW": "distmuon.MuonW"}
    written = re.sub(r"\n{2,}", "\n\n", "\n".join(api_reference.as_rst(DOCSTRING.splitlines(), links)))
    assert written.replace("\\ ", "").split("\n") == [
        "Clip the norm of ``p``, as :py:obj:`~distmuon.MuonW` does with "
        'norm: not ``"all"``, nor ``kind="sum"`` or ``--some``; see '
        r"clip\_grad\_norm\_ and \*args.",
        "",
        "::",
        "",
        "    clip(p)",
        "",
        "    clip(q)",
        "",
        "``lr`` to ``eps``",
        "    of the groups, as ``Muon`` has them, or with none: one of:",
        "",
        "    ``step``, ``time``",
        "        numbers",
        "",
        "    ``table``",
        r"        the values of \|x\| in rows",
        "",
        "Raises ValueError: never.",
    ]
