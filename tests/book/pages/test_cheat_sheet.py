"""The cheat sheet: every formula is run against the code it speaks of, and every command is one that exists.

`CODE` says in Python what each formula of the page says in TeX.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

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
from distmuon.optim.options import MUON_DEFAULTS
from distmuon.sharding.layout import FLAT, Layout, ParamSpec, plan
from distmuon.verify.model_states import ModelStates, predict_replicas, predict_rows, predict_shards
from distmuon.verify.prediction import predict_step, predict_work
from muonbook.baselines import TITLES
from muonbook.ch18 import small_puzzles
from muonbook.measure import formulas
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.stages import Degrees
from muonbook.planner.world_plan import WorldPlan, WorldSetting

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "book" / "cheat_sheet.md").read_text(encoding="utf-8")
MATH = {"sqrt": math.sqrt, "max": max}
CODE = {
    r"M \leftarrow \mu\,M + G": "M = mu * M + G",
    r"U = \mu\,M + G": "U = mu * M + G",
    r"O = \mathrm{NewtonSchulz}(U)": "O = newton_schulz(U)",
    r"W \leftarrow (1 - \eta\,\lambda)\,W - \eta\,\mathrm{scale}\,O": "W = (1 - eta * lam) * W - eta * scale * O",
    r"\mathrm{scale} = 0.2\,\sqrt{\max(A,\, B)}": "scale = 0.2 * sqrt(max(A, B))",
    r"\mathrm{scale} = \sqrt{\max(1,\, \dfrac{A}{B})}": "scale = sqrt(max(1, A / B))",
    r"X = \dfrac{U}{\Vert U \Vert_F}": "X = U / norm(U)",
    r"R = X\,X^\top": "R = X @ X.mT",
    r"X \leftarrow a\,X + (b\,R + c\,R\,R)\,X": "X = a * X + (b * R + c * R @ R) @ X",
    r"\mathrm{work} = 5\,(4\,A^{2}\,B + 2\,A^{3})": "work = 5 * (4 * A ** 2 * B + 2 * A ** 3)",
    r"\mathrm{share} = \dfrac{\mathrm{work}}{6\,A\,B\,N}": "share = work / (6 * A * B * N)",
    r"\mathrm{share} = \dfrac{5\,A}{N}": "share = 5 * A / N",
    r"\mathrm{zero1} = \dfrac{D - 1}{D}\,n\,(g + w)": "zero1 = (D - 1) / D * n * (g + w)",
    r"\mathrm{muon} = \mathrm{zero1} + m\,n\,\mathrm{sent}": "muon = zero1 + m * n * sent",
    r"\dfrac{D - 1}{D} + \dfrac{(T - 1)\,s}{D}": "(D - 1) / D + (T - 1) * s / D",
    r"\dfrac{s - 1}{D} + \dfrac{(T - 1)\,s}{D}": "(s - 1) / D + (T - 1) * s / D",
    r"\dfrac{2\,(T - 1)}{T\,D}": "2 * (T - 1) / (T * D)",
    r"\dfrac{2\,(T - 1)}{T\,D\,k}": "2 * (T - 1) / (T * D * k)",
    r"s\,T": "s * T",
    "1": "1",
    "16": "16",
    "12": "12",
    r"8 + \dfrac{8}{D}": "8 + 8 / D",
    r"8 + \dfrac{4}{D}": "8 + 4 / D",
    r"6 + \dfrac{12}{D}": "6 + 12 / D",
    r"6 + \dfrac{8}{D}": "6 + 8 / D",
    r"\dfrac{16}{D}": "16 / D",
    r"\dfrac{12}{D}": "12 / D",
    r"\mathrm{interval} = \sqrt{2\,c\,m}": "interval = sqrt(2 * c * m)",
    r"\mathrm{bubble} = \dfrac{P - 1}{M + P - 1}": "bubble = (P - 1) / (M + P - 1)",
}


class SheetLayout(NamedTuple):
    """A row of the table of layouts: options of DistributedMuon, two formulas, and what happens."""

    ask: str
    sent: str
    repeats: str
    says: str


def rows(section: str) -> list[list[str]]:
    """Return the cells of the section's table, its formulas as Python."""
    body = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in body.splitlines() if line.startswith("|")][2:]
    return [[CODE[cell.strip("$")] if cell.startswith("$") else cell for cell in cells] for cells in lines]


def layouts() -> list[SheetLayout]:
    found = []
    for first, *others in rows("The layouts of DistributedMuon"):
        name, *asked = first.split("<br>")
        assert name.strip("*") in {*TITLES.values(), "periodic"}
        found.append(SheetLayout(", ".join(option.strip("`") for option in asked), *others))
    return found


STEP, ITERATION, BYTES, LONG = (
    rows(title)
    for title in ("A step of Muon", "Newton–Schulz", "Bytes that a rank sends", "A long training on many GPUs")
)
LAYOUTS = layouts()
COMMANDS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def run(formulas: list[list[str]], names: dict[str, Any]) -> None:
    """Run what the sheet shows, line by line."""
    for code, _ in formulas:
        exec(code, {}, names)


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
    run(STEP[at : at + 1], names)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        names["G"] = gradient
        run(STEP[:4], names)
    torch.testing.assert_close(names["W"], weight.detach(), rtol=1e-12, atol=1e-15)
    shown = " ".join(says for _, says in STEP)
    signs = {"μ": "momentum", "η": "lr", "λ": "weight_decay"}
    assert all(f"{sign} = {group[name]:g}" in shown for sign, name in signs.items())


def test_five_iterations_by_the_sheet_are_newton_schulz() -> None:
    matrix = torch.randn(6, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    names: dict[str, Any] = {"U": matrix, "norm": torch.linalg.matrix_norm, **dict(zip("abc", MUON, strict=True))}
    run(ITERATION[:1], names)
    for _ in range(5):
        run(ITERATION[1:3], names)
    torch.testing.assert_close(names["X"], newton_schulz(matrix), rtol=1e-10, atol=1e-12)
    a, b, c = MUON
    assert ITERATION[2][1] == f"Repeated 5 times with a = {a:.4f}, b = −{-b:.4f}, c = {c:.4f}."


def test_work_and_share_are_those_that_the_book_counts_with() -> None:
    names: dict[str, Any] = {"A": 48, "B": 64, "N": 4096}
    run(ITERATION[3:5], names)
    assert names["work"] == flops((48, 64)) == flops((64, 48))
    assert names["share"] == pytest.approx(flops((48, 64)) / (3 * 2 * 48 * 64 * 4096))
    square: dict[str, Any] = {"A": 64, "B": 64, "N": 4096}
    run(ITERATION[3:5], square)
    assert square["share"] == pytest.approx(5 * 64 / 4096)
    run(ITERATION[5:6], square)
    assert square["share"] == pytest.approx(5 * 64 / 4096)


@pytest.mark.parametrize(("dp", "tp", "s"), [*product((2, 3, 8), (1, 2, 4), (1, Fraction(3, 2), 2))])
def test_bytes_of_the_gathering_layouts_and_of_owner_are_the_closed_formulas(dp: int, tp: int, s: Fraction) -> None:
    sizes = {"n": 5040, "g": 4, "w": 4, "m": 2}
    for layout in LAYOUTS[:4]:
        strategy = options(layout)["strategy"]
        sent = value(layout.sent, D=dp, T=tp, s=s)
        assert sent == formulas.momentum_sent(strategy, dp, tp, s)
        names: dict[str, Any] = {name: Fraction(size) for name, size in {**sizes, "D": dp}.items()} | {"sent": sent}
        run(BYTES, names)
        assert names["zero1"] == formulas.zero1_adamw(dp, sizes["n"], 4, 4)
        assert names["muon"] == formulas.muon(strategy, dp, tp, **sizes, s=s)


def matrices(dp: int, tp: int, strategy: str, size: int = 1, cut: bool = True) -> tuple[Layout, list[int]]:
    """Return the map of 12 equal matrices, [16, 8] each, that TP cuts by rows; size: elements of a bucket."""
    dim = 0 if cut else None
    specs = [ParamSpec(f"m{i}", (16 // tp if cut else 16, 8), "float32", dim) for i in range(12)]
    muon = list(range(12))
    return strategies.planner(strategy)(specs, muon, dp, tp, size), muon


def test_periodic_sends_owners_bytes_in_every_kth_step_and_blockwise_none() -> None:
    dp, tp, layout = 3, 2, LAYOUTS[4]
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
    for layout in LAYOUTS:
        asked = options(layout)
        ours, muon = matrices(dp, tp, asked["strategy"], asked.get("bucket_size", 200))
        s = formulas.mean_owners(ours, muon)
        work = sum(predict_work(asked["strategy"], ours, tp, muon).values())
        assert Fraction(work, 12 * flops((16, 8))) == value(layout.repeats, s=s, T=tp), layout
        assert s == 1 if layout.repeats == "1" else s >= 1
    gathered = [matrices(5, 1, "gather_all", size) for size in (200, FLAT)]
    s_bucketed, s_flat = (formulas.mean_owners(*one) for one in gathered)
    assert s_flat < s_bucketed, "one bucket cuts fewer matrices"


def options(layout: SheetLayout) -> dict[str, Any]:
    """Return the options of DistributedMuon that a layout is asked for with."""
    found: dict[str, Any] = eval(f"dict({layout.ask})", {"FLAT": FLAT})
    return found


def test_a_layout_is_asked_for_by_options_that_exist() -> None:
    for layout in LAYOUTS:
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
    assert [[value(code, D=dp) for code in codes] for _, *codes in rows("Bytes that a rank keeps per element")] == found


def test_interval_and_bubble_are_those_of_chapter_18_and_of_the_planner() -> None:
    names: dict[str, Any] = {**MATH, "c": 2.0, "m": 11_135.0, "P": 4, "M": 32}
    run(LONG, names)
    assert names["interval"] == pytest.approx(small_puzzles.save_every(2.0, 11_135.0))
    shape = MODELS["llama3_8b"]
    plan = WorldPlan(WorldSetting(shape, Degrees(4, 2, 4), tokens=4 * 32 * shape.context))
    assert names["bubble"] == pytest.approx(plan.bubble)


# ---- Commands ---------------------------------------------------------------------------------------------


def test_lines_of_python_use_names_and_defaults_that_exist() -> None:
    called = set()
    for language, code in COMMANDS:
        if language == "python":
            called |= {node.func.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)}  # type: ignore[attr-defined]
    assert called - {"fully_shard"} <= set(distmuon.__all__)
    assert callable(fsdp.fully_shard)
    assert {"MuonW", "DistributedMuon"} <= called
    assert set(re.findall(r"lr=(\S+)\)", PAGE)) == {f"{MUON_DEFAULTS['lr']:g}"}


def test_lines_for_a_shell_name_targets_scripts_and_options_that_exist() -> None:
    lines = [code for language, code in COMMANDS if language == "sh"]
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
