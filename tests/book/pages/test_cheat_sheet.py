"""The cheat sheet: every formula is run against the code it speaks of, and every command is one that exists."""

from __future__ import annotations

import ast
import inspect
import math
import re
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from torch.distributed import fsdp

import distmuon
from distmuon.optim import strategies
from distmuon.optim.coefficients import MUON
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.muon import Muon
from distmuon.optim.newton_schulz import flops, newton_schulz
from distmuon.sharding.layout import FLAT, Layout, ParamSpec, plan
from distmuon.verify.model_states import ModelStates, predict_replicas, predict_rows, predict_shards
from distmuon.verify.prediction import predict_step, predict_work
from muonbook.ch18 import small_puzzles
from muonbook.measure import formulas
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.stages import Degrees
from muonbook.planner.world_plan import WorldPlan, WorldSetting
from tools.pages import cheat_sheet as sheet
from tools.pages.formula import typeset

ROOT = Path(__file__).resolve().parents[3]
MATH = {"sqrt": math.sqrt, "max": max}


def run(formulas: tuple[sheet.Formula, ...], names: dict[str, Any]) -> None:
    """Run what the sheet shows, line by line."""
    for formula in formulas:
        exec(formula.code, {}, names)


def value(code: str, **names: int | Fraction) -> Fraction:
    """Return what an expression of the sheet comes to, exactly."""
    return Fraction(eval(code, {}, {name: Fraction(number) for name, number in names.items()}))


# ---- Formulas ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "at"), [("match_rms", 4), ("original", 5)])
@pytest.mark.parametrize("shape", [(6, 10), (12, 5)])
def test_two_steps_by_the_sheet_are_two_steps_of_muon(kind: str, at: int, shape: tuple[int, int]) -> None:
    draw = torch.Generator().manual_seed(0)
    first, *gradients = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(3))
    weight = torch.nn.Parameter(first.clone())
    optimizer = Muon([{"params": [weight], "scale": kind}])
    group = optimizer.param_groups[0]
    names: dict[str, Any] = {**MATH, "A": shape[0], "B": shape[1], "newton_schulz": newton_schulz}
    names |= {"W": first.clone(), "M": torch.zeros(shape, dtype=torch.float64)}
    names |= {"eta": group["lr"], "lam": group["weight_decay"], "mu": group["momentum"]}
    exec(sheet.STEP[at].code, {}, names)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        names["G"] = gradient
        run(sheet.STEP[:4], names)
    torch.testing.assert_close(names["W"], weight.detach(), rtol=1e-12, atol=1e-15)
    shown = " ".join(formula.says for formula in sheet.STEP)
    signs = {"μ": "momentum", "η": "lr", "λ": "weight_decay"}
    assert all(f"{sign} = {group[name]:g}" in shown for sign, name in signs.items())


def test_five_iterations_by_the_sheet_are_newton_schulz() -> None:
    matrix = torch.randn(6, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    names: dict[str, Any] = {"U": matrix, "norm": torch.linalg.matrix_norm, **dict(zip("abc", MUON, strict=True))}
    run(sheet.ITERATION[:1], names)
    for _ in range(5):
        run(sheet.ITERATION[1:3], names)
    torch.testing.assert_close(names["X"], newton_schulz(matrix), rtol=1e-10, atol=1e-12)
    a, b, c = MUON
    assert sheet.ITERATION[2].says == f"Repeated 5 times with a = {a:.4f}, b = −{-b:.4f}, c = {c:.4f}."


def test_work_and_share_are_those_that_the_book_counts_with() -> None:
    names: dict[str, Any] = {"A": 48, "B": 64, "N": 4096}
    run(sheet.ITERATION[3:5], names)
    assert names["work"] == flops((48, 64)) == flops((64, 48))
    assert names["share"] == pytest.approx(flops((48, 64)) / (3 * 2 * 48 * 64 * 4096))
    square: dict[str, Any] = {"A": 64, "B": 64, "N": 4096}
    run(sheet.ITERATION[3:5], square)
    assert square["share"] == pytest.approx(5 * 64 / 4096)
    run(sheet.ITERATION[5:6], square)
    assert square["share"] == pytest.approx(5 * 64 / 4096)


@pytest.mark.parametrize(("dp", "tp", "s"), [*product((2, 3, 8), (1, 2, 4), (1, Fraction(3, 2), 2))])
def test_bytes_of_the_gathering_layouts_and_of_owner_are_the_closed_formulas(dp: int, tp: int, s: Fraction) -> None:
    sizes = {"n": 5040, "g": 4, "w": 4, "m": 2}
    for layout in sheet.LAYOUTS[:4]:
        strategy = options(layout)["strategy"]
        sent = value(layout.sent, D=dp, T=tp, s=s)
        assert sent == formulas.momentum_sent(strategy, dp, tp, s)
        names: dict[str, Any] = {name: Fraction(size) for name, size in {**sizes, "D": dp}.items()} | {"sent": sent}
        run(sheet.BYTES, names)
        assert names["zero1"] == formulas.zero1_adamw(dp, sizes["n"], 4, 4)
        assert names["muon"] == formulas.muon(strategy, dp, tp, **sizes, s=s)


def matrices(dp: int, tp: int, strategy: str, size: int = 1, cut: bool = True) -> tuple[Layout, list[int]]:
    """Return the map of 12 equal matrices, [16, 8] each, that TP cuts by rows; size: elements of a bucket."""
    dim = 0 if cut else None
    specs = [ParamSpec(f"m{i}", (16 // tp if cut else 16, 8), "float32", dim) for i in range(12)]
    muon = list(range(12))
    return strategies.planner(strategy)(specs, muon, dp, tp, size), muon


def test_periodic_sends_owners_bytes_in_every_kth_step_and_blockwise_none() -> None:
    dp, tp, layout = 3, 2, sheet.LAYOUTS[4]
    every = strategies.load("periodic").options({})["whole_every"]
    assert f"k = {every};" in layout.says
    ours, muon = matrices(dp, tp, options(layout)["strategy"])
    n = sum(spec.numel for spec in ours.specs)

    def sent(strategy: str, **whole: Any) -> int:
        ledgers = [predict_step(ours, tp, d, muon, strategy, None, t, **whole) for d in range(dp) for t in range(tp)]
        return sum(traffic.sent_bytes for ledger in ledgers for entry, traffic in ledger if entry.group == "tp")

    steps = [sent("periodic", whole=muon if step == every else ()) for step in range(1, every + 1)]
    assert Fraction(sum(steps), every * dp * tp) == 2 * n * value(layout.sent, D=dp, T=tp, k=every)
    blocks, muon = matrices(dp, tp, "blockwise")
    assert (
        sum(t.sent_bytes for e, t in predict_step(blocks, tp, 0, muon, "blockwise") if e.label[:8] == "momentum") == 0
    )
    assert "`blockwise` never sends" in layout.says


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (5, 1), (5, 2)])
def test_a_matrix_is_orthogonalized_as_often_as_the_sheet_says(dp: int, tp: int) -> None:
    for layout in sheet.LAYOUTS:
        asked = options(layout)
        ours, muon = matrices(dp, tp, asked["strategy"], asked.get("bucket_size", 200))
        s = formulas.mean_owners(ours, muon)
        work = sum(predict_work(asked["strategy"], ours, tp, muon).values())
        assert Fraction(work, 12 * flops((16, 8))) == value(layout.repeats, s=s, T=tp), layout.name
        assert s == 1 if layout.repeats == "1" else s >= 1
    gathered = [matrices(5, 1, "gather_all", size) for size in (200, FLAT)]
    s_bucketed, s_flat = (formulas.mean_owners(*one) for one in gathered)
    assert s_flat < s_bucketed, "one bucket cuts fewer matrices"


def options(layout: sheet.SheetLayout) -> dict[str, Any]:
    """Return the options of DistributedMuon that a layout is asked for with."""
    found: dict[str, Any] = eval(f"dict({layout.ask})", {"FLAT": FLAT})
    return found


def test_a_layout_is_asked_for_by_options_that_exist() -> None:
    for layout in sheet.LAYOUTS:
        asked = options(layout)
        assert asked["strategy"] in strategies.names()
        assert set(asked) <= set(inspect.signature(DistributedMuon).parameters)


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_rank_keeps_the_bytes_that_the_sheet_says(dp: int) -> None:
    def kept(states: ModelStates) -> int:
        return sum(size for kind, size in states.items() if kind != "counters")

    found = []
    for dtype, predict in (
        ("float32", predict_replicas),
        ("float32", predict_shards),
        ("bfloat16", predict_shards),
        ("float32", predict_rows),
    ):
        layout = plan([ParamSpec("matrix", (16, 8), dtype)], dp)
        found.append([Fraction(kept(predict(layout, 0, muon)), 16 * 8) for muon in ((), (0,))])
    assert [[value(code, D=dp) for code in (row.adamw, row.muon)] for row in sheet.MEMORY] == found


def test_interval_and_bubble_are_those_of_chapter_18_and_of_the_planner() -> None:
    names: dict[str, Any] = {**MATH, "c": 2.0, "m": 11_135.0, "P": 4, "M": 32}
    run(sheet.LONG, names)
    assert names["interval"] == pytest.approx(small_puzzles.save_every(2.0, 11_135.0))
    shape = MODELS["llama3_8b"]
    plan = WorldPlan(WorldSetting(shape, Degrees(4, 2, 4), tokens=4 * 32 * shape.context))
    assert names["bubble"] == pytest.approx(plan.bubble)


# ---- Commands ---------------------------------------------------------------------------------------------


def test_lines_of_python_use_names_that_exist() -> None:
    called = set()
    for command in filter(sheet.is_python, sheet.COMMANDS):
        called |= {node.func.id for node in ast.walk(ast.parse(command.code)) if isinstance(node, ast.Call)}  # type: ignore[attr-defined]
    assert called - {"fully_shard"} <= set(distmuon.__all__)
    assert callable(fsdp.fully_shard)
    assert {"MuonW", "DistributedMuon"} <= called


def test_lines_for_a_shell_name_targets_scripts_and_options_that_exist() -> None:
    lines = [command.code for command in sheet.COMMANDS if not sheet.is_python(command)]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    scripts = 0
    for line in lines:
        program, *words = line.split()
        if program == "make":
            assert words[0] in targets
        elif program == "python":
            ending = worlds.finish(str(ROOT / words[0]), "--help")
            assert all(word in ending[1] for word in words if word.startswith("--"))
            scripts += 1
        else:
            assert (program, words[:2]) == ("pytest", ["--pyargs", "muon_conformance"])
            assert '"--optimizer"' in (ROOT / "scripts/muon_conformance/plugin.py").read_text(encoding="utf-8")
    assert scripts == 2
    assert "llama3_70b" in MODELS


# ---- Formulas as TeX --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "tex"),
    [
        ("M = mu * M + G", r"M \leftarrow \mu\,M + G"),
        ("R = X @ X.mT", r"R = X\,X^\top"),
        ("(a - (b - c)) * d", r"(a - (b - c))\,d"),
        ("(a + b) ** 2 / c", r"\dfrac{(a + b)^{2}}{c}"),
        ("sqrt(max(1, A / B))", r"\sqrt{\max(1,\, \dfrac{A}{B})}"),
        ("newton_schulz(U) / norm(U)", r"\dfrac{\mathrm{NewtonSchulz}(U)}{\Vert U \Vert_F}"),
    ],
)
def test_python_becomes_tex(code: str, tex: str) -> None:
    assert typeset(code) == tex


@pytest.mark.parametrize("code", ["a // b", "a if b else c", "del a", "f'{a}'"])
def test_what_has_no_notation_is_refused(code: str) -> None:
    with pytest.raises(ValueError, match=r"no notation|neither"):
        typeset(code)
