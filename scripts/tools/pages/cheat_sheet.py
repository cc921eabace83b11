"""The cheat sheet: formulas, layouts and commands on one page, as Markdown.

Formulas are Python (see `formula`), and a test runs each against the code that the book trains and plans with; numbers
are read from that code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distmuon.optim.coefficients import MUON
from distmuon.optim.options import MUON_DEFAULTS
from distmuon.optim.strategies.periodic import OPTIONS as PERIODIC
from muonbook.markdown_table import table
from muonbook.ways import TITLES
from tools.pages.formula import typeset

QUINTIC = ", ".join(f"{name} = {value:.4f}" for name, value in zip("abc", MUON, strict=True)).replace("-", "−")


class Formula(NamedTuple):
    """code: an assignment in Python. says: what it is, with its unit."""

    code: str
    says: str


class SheetLayout(NamedTuple):
    """name: as the book calls it. ask: of DistributedMuon. sent: what a rank sends beside ZeRO-1, over m n bytes.
    repeats: how many times the grid orthogonalizes each matrix. says: what happens."""

    name: str
    ask: str
    sent: str
    repeats: str
    says: str


class Kept(NamedTuple):
    """What a rank keeps of a hidden matrix, in bytes per element: with AdamW, and with Muon."""

    way: str
    adamw: str
    muon: str


class Command(NamedTuple):
    """What to type, in Python or in a shell, and what comes of it."""

    code: str
    says: str


STEP = (
    Formula(
        "M = mu * M + G",
        f"Momentum, with μ = {MUON_DEFAULTS['momentum']:g} and the mean gradient G. All numbers here are defaults.",
    ),
    Formula("U = mu * M + G", "Nesterov's look ahead, which is what Newton–Schulz receives."),
    Formula("O = newton_schulz(U)", "The nearest matrix whose singular values are all about 1. It needs U whole."),
    Formula(
        "W = (1 - eta * lam) * W - eta * scale * O",
        f"Step with the learning rate η = {MUON_DEFAULTS['lr']:g} and the decay λ = {MUON_DEFAULTS['weight_decay']:g}.",
    ),
    Formula(
        "scale = 0.2 * sqrt(max(A, B))",
        "For a matrix [A, B], by default. The RMS of an update is then about AdamW's, 0.2 η.",
    ),
    Formula("scale = sqrt(max(1, A / B))", 'With `scale="original"`, which needs another learning rate.'),
)
ITERATION = (
    Formula("X = U / norm(U)", "The Frobenius norm becomes 1. A tall matrix is transposed first."),
    Formula("R = X @ X.mT", "The Gram matrix [A, A] of a matrix [A, B] with A ≤ B."),
    Formula(
        "X = a * X + (b * R + c * R @ R) @ X",
        f"Repeated {MUON_DEFAULTS['ns_steps']} times with {QUINTIC}.",
    ),
    Formula("work = 5 * (4 * A ** 2 * B + 2 * A ** 3)", "Floating-point operations of five iterations."),
    Formula(
        "share = work / (6 * A * B * N)",
        "Of forward and backward, if the matrix sees N tokens in a step and is orthogonalized once.",
    ),
    Formula("share = 5 * A / N", "The same for square matrices: twice the batch halves it."),
)
BYTES = (
    Formula("zero1 = (D - 1) / D * n * (g + w)", "Bytes that a rank sends in a step of ZeRO-1 with AdamW."),
    Formula("muon = zero1 + m * n * sent", "With Muon, which also sends momentum. The factor “sent” is the layout's."),
)
SYMBOLS = (
    "D and T count the data-parallel and tensor-parallel ranks. n is the number of elements of the hidden matrices on "
    "a tensor-parallel rank. s is how many data-parallel ranks own a piece of a matrix on average, from 1 to D. g, w "
    "and m are the bytes per element of gradients, parameters and momentum on the wire, in the Moonlight paper 4, 4 "
    "and 2."
)
ABOUT_LAYOUTS = (
    "*sent* goes into the formula above, and *times* says how often all ranks together orthogonalize one matrix in a "
    "step. **MuonW** is none of these but an optimizer of its own on FSDP2, "
    "and [the back of an envelope](envelope.md) has the bytes that it adds there."
)
LAYOUTS = (
    SheetLayout(
        TITLES["muon"],
        'strategy="gather_all"',
        "(D - 1) / D + (T - 1) * s / D",
        "s * T",
        "Every rank gathers one bucket after the other.",
    ),
    SheetLayout(
        TITLES["muon_flat"],
        'strategy="gather_all", bucket_size=FLAT',
        "(D - 1) / D + (T - 1) * s / D",
        "s * T",
        "The same with one bucket, `FLAT` of `distmuon.sharding.layout`, so that s is smaller and all momentum is in "
        "memory at once.",
    ),
    SheetLayout(
        TITLES["muon_cut"],
        'strategy="gather_cut", bucket_size=FLAT',
        "(s - 1) / D + (T - 1) * s / D",
        "s * T",
        "Only the pieces of matrices that a shard boundary cuts travel, among the owners of each.",
    ),
    SheetLayout(
        TITLES["muon_owner"],
        'strategy="owner"',
        "2 * (T - 1) / (T * D)",
        "1",
        "No shard cuts a matrix, and one rank of the grid takes each. Shards are padded to one length, and "
        "the formula leaves this padding out.",
    ),
    SheetLayout(
        "periodic",
        'strategy="periodic"',
        "2 * (T - 1) / (T * D * k)",
        "1",
        "Not the same optimizer: matrices are whole in every k-th step, and otherwise each rank takes its block. The "
        f"default is k = {PERIODIC['whole_every']}; `blockwise` never sends, and takes blocks always.",
    ),
)
MEMORY = (
    Kept("one device or DDP, float32", "16", "12"),
    Kept("ZeRO-1, float32", "8 + 8 / D", "8 + 4 / D"),
    Kept("ZeRO-1, bf16 with gradients and masters in float32", "6 + 12 / D", "6 + 8 / D"),
    Kept("FSDP2, float32 shards", "16 / D", "12 / D"),
)
LONG = (
    Formula(
        "interval = sqrt(2 * c * m)",
        "Seconds between two checkpoints, if saving one holds training up for c seconds and something fails every m "
        "seconds.",
    ),
    Formula(
        "bubble = (P - 1) / (M + P - 1)",
        "The share of a step in which a stage waits, with P pipeline stages and M micro-batches for each pipeline.",
    ),
)
COMMANDS = (
    Command("make demo", "Train on 8 processes, compare with one process, and count every byte."),
    Command("make test", "Check style and types, then run every test."),
    Command(
        f"optimizer = MuonW(model, lr={MUON_DEFAULTS['lr']:g})",
        "Hidden matrices go to Muon, and all other parameters to AdamW.",
    ),
    Command(
        f"fully_shard(model, mesh=mesh)\noptimizer = MuonW(model, lr={MUON_DEFAULTS['lr']:g})",
        "The same on FSDP2, with two collectives for every 25 million elements of a rank (100 million on a GPU).",
    ),
    Command(
        'DistributedMuon(split_parameters(model), grid, strategy="owner")',
        "ZeRO-1 on a grid of D × T ranks, with any of the layouts.",
    ),
    Command(
        "python scripts/train.py --dp 2 --folder out/alice",
        "Train a small transformer on text. The same command resumes a run.",
    ),
    Command(
        "python scripts/plan.py --model llama3_70b --ranks 512 --sequence-parallel",
        "Find grids that fit, with memory, bytes and time, without starting a process.",
    ),
    Command(
        "pytest --pyargs muon_conformance --optimizer torch.optim:Muon",
        "Examine any implementation of Muon.",
    ),
)


def markdown() -> str:
    """Return the sheet as the page includes it."""
    layouts = [(f"**{one.name}**<br>{_asked(one)}", _math(one.sent), _math(one.repeats), one.says) for one in LAYOUTS]
    memory = [(one.way, _math(one.adamw), _math(one.muon)) for one in MEMORY]
    parts = (
        ("A step of Muon", _formulas(STEP)),
        ("Newton–Schulz", _formulas(ITERATION)),
        ("Bytes that a rank sends", f"{_formulas(BYTES)}\n{SYMBOLS}"),
        (
            "The layouts of DistributedMuon",
            f"{ABOUT_LAYOUTS}\n\n{table(('layout', 'sent', 'times', 'what happens'), layouts)}",
        ),
        (
            "Bytes that a rank keeps per element",
            table(("parameters, gradients and state of a hidden matrix", "AdamW", "Muon"), memory),
        ),
        ("A long training on many GPUs", _formulas(LONG)),
        ("Commands", "\n\n".join(_command(one) for one in COMMANDS)),
    )
    return "\n\n".join(f"## {title}\n\n{body.strip()}" for title, body in parts) + "\n"


def _asked(layout: SheetLayout) -> str:
    """Return the options one below the other, because code does not wrap in a table."""
    return "<br>".join(f"`{option}`" for option in layout.ask.split(", "))


def _math(code: str) -> str:
    return f"${typeset(code)}$"


def _formulas(formulas: Sequence[Formula]) -> str:
    return table(("formula", "what it is"), [(_math(one.code), one.says) for one in formulas])


def _command(one: Command) -> str:
    return f"{one.says}\n\n```{'python' if is_python(one) else 'sh'}\n{one.code}\n```"


def is_python(command: Command) -> bool:
    """Return whether a command is a line of a program, and not of a shell."""
    return "(" in command.code
