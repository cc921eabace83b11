"""Figures that others have published of their clusters, and what the planner says of the same worlds.

We did not tune the planner to these. For each we state what we assume: products run at `SUSTAINED` of a card's peak in
bf16, as everywhere in the planner, and AdamW's step is the one that was published, because we cannot plan the seconds
of other people's networks. So what is compared is Newton–Schulz, and what it adds to that step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from muonbook.markdown_table import table
from muonbook.planner.algorithms import ALGORITHMS
from muonbook.planner.fabrics import DEVICES, SUSTAINED
from muonbook.planner.model_shapes import MODELS, Experts, Shape
from muonbook.planner.stages import Degrees
from muonbook.planner.world_plan import WorldPlan, WorldSetting

GB300_PEAK = 2.5e15  # bf16 FLOPs per second, dense: NVIDIA, GB300 NVL72 datasheet, 180e15 for 72
A800_PEAK = DEVICES["a100"].peak_flops  # an A100 with a slower NVLink
H100_PEAK = DEVICES["h100"].peak_flops

QWEN3_30B = Shape(
    "Qwen3 30B-A3B", "Qwen/Qwen3-30B-A3B, config.json, with attention of width x width", layers=48, width=2048,
    heads=32, key_heads=4, mlp=6144, vocabulary=151936, context=4096,
    experts=Experts(routed=128, active=8, width=768, shared=768, dense_layers=0),
)  # fmt: skip
QWEN25_7B = Shape(
    "Qwen2.5 7B", "Qwen/Qwen2.5-7B, config.json", layers=28, width=3584, heads=28, key_heads=4, mlp=18944,
    vocabulary=152064, context=4096,
)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """what: the quantity, with its unit. world: model, ranks and how they are divided. note: what differs, or None.

    by: who published it. second_hand: whether we have it from others' notes alone. published, planned: values.
    """

    what: str
    by: str
    world: str
    published: float
    planned: Callable[[], float]
    note: str = ""
    second_hand: bool = False

    @property
    def error(self) -> float:
        """By how much the plan is off, in parts of what was published."""
        return self.planned() / self.published - 1


@cache
def _plan(shape: Shape, degrees: Degrees, tokens: int) -> WorldPlan:
    return WorldPlan(WorldSetting(shape, degrees, tokens=tokens).by(ALGORITHMS["owner"]))


def _seconds(flops: float, peak: float) -> float:
    return flops / (SUSTAINED * peak)


def _added(shape: Shape, degrees: Degrees, tokens: int, adamw_tflops: float) -> float:
    """Return what Newton–Schulz of the slowest rank adds to a step in which AdamW reached so many TFLOP/s per GPU."""
    adamw = 6 * shape.active * tokens / degrees.ranks / (adamw_tflops * 1e12)
    return _seconds(_plan(shape, degrees, tokens).flops[1], GB300_PEAK) / adamw


def _operations(shape: Shape, degrees: Degrees, tokens: int) -> float:
    """Return the operations of Newton–Schulz over those of forward and backward, of the whole step."""
    return _plan(shape, degrees, tokens).flops[0] * degrees.ranks / (6 * shape.active * tokens)


def _millions(tokens: int) -> str:
    return f"{tokens / 1e6:.3g} million"


K2, QWEN3 = (MODELS["kimi_k2"], Degrees(64, 1, 4, 64), 1 << 24), (QWEN3_30B, Degrees(8, 1, 1, 8), 1 << 21)
SEVEN_B, SEVENTY_B = (QWEN25_7B, Degrees(256, 1, 1, 1), 1 << 22), (MODELS["llama3_70b"], Degrees(32, 1, 1, 1), 1 << 18)
DMUON_ADAMW = 2.844  # seconds of a step, 256 GPUs


def _everywhere() -> float:
    """Return seconds of Newton–Schulz where every rank does it for all matrices of the 7B."""
    return _seconds(_plan(*SEVEN_B).flops[0] * SEVEN_B[1].ranks, A800_PEAK)


ADDED, TIMED = "what Muon adds to AdamW's step", "seconds of Newton–Schulz"
FIGURES = (
    Published(
        ADDED,
        "NVIDIA, April 2026",
        "Kimi K2's sizes, 256 GB300",
        1051 / 1029 - 1,
        lambda: _added(*K2, 1051),
        f"4 pipeline stages, experts over 64 ranks, and we assume {_millions(K2[2])} tokens in a step. The model runs "
        "in MXFP8, and the two runs also differ in how they send gradients and parameters",
    ),
    Published(
        ADDED,
        "NVIDIA, April 2026",
        "Qwen3 30B-A3B, 8 GB300",
        713 / 686 - 1,
        lambda: _added(*QWEN3, 713),
        f"experts over 8 ranks, and we assume {_millions(QWEN3[2])} tokens in a step. The model runs in MXFP8",
    ),
    Published(
        ADDED,
        "DMuon, June 2026",
        "Qwen2.5 7B, 256 A800, every GPU orthogonalizes all matrices",
        6.219 / DMUON_ADAMW - 1,
        lambda: _everywhere() / DMUON_ADAMW,
        "the plan leaves out how long it gathers them",
        second_hand=True,
    ),
    Published(
        ADDED,
        "DMuon, June 2026",
        "Qwen2.5 7B, 256 A800, one owner per matrix",
        2.850 / DMUON_ADAMW - 1,
        lambda: _seconds(_plan(*SEVEN_B).flops[1], A800_PEAK) / DMUON_ADAMW,
        second_hand=True,
    ),
    Published(
        TIMED,
        "DMuon, June 2026",
        "Qwen2.5 7B, 256 A800, every GPU orthogonalizes all matrices",
        3.604,
        _everywhere,
        second_hand=True,
    ),
    Published(
        TIMED,
        "Gram Newton–Schulz, March 2026",
        "Llama 3 70B, 32 H100, the part of one GPU",
        0.897417,
        lambda: _seconds(_plan(*SEVENTY_B).flops[0], H100_PEAK),
        "they measured the products, and assumed the cluster",
    ),
)
OPERATIONS = (  # of Newton–Schulz, over those of forward and backward: Kimi K2's sizes and Qwen3 30B-A3B, as above
    Published("operations", "NVIDIA, April 2026", "Kimi K2's sizes", 51 / 1029, lambda: _operations(*K2)),
    Published("operations", "NVIDIA, April 2026", "Qwen3 30B-A3B", 35 / 686, lambda: _operations(*QWEN3)),
)
NOT_COMPARED = (
    "Moonlight's 1 to 3 per cent",  # a remark without a grid; the page of claims plans it on several
    "Canzona's 1.57 and 5.8",  # neither the GPU nor the grid nor the batch is given, and the baseline is unclear
    "MuonBP's 8 per cent",  # GPU, number of GPUs and batch are not given
    "Megatron's 632 to 157 ms",  # model and batch are not given, and its two texts have different numbers
)


def markdown() -> str:
    """Return a table of what clusters have measured and what the planner says of them, and a fold with what differs."""
    rows = [
        (
            figure.what,
            f"{figure.by}{'†' * figure.second_hand}: {figure.world}",
            *(_value(figure, value) for value in (figure.published, figure.planned())),
        )
        for figure in FIGURES
    ]
    notes = [f"- {figure.by}, {figure.world}: {figure.note}." for figure in FIGURES if figure.note]
    *others, last = NOT_COMPARED
    notes += [
        f"- {_why_nvidias_differ()}",
        f"- {_why_dmuons_differ()}",
        f"- Not in the table, because they lack a model, a grid or a batch: {', '.join(others)} and {last}.",
    ]
    lines = "\n".join(notes)
    return (
        f"{table(('what', 'where', 'published', 'our plan'), rows)}\n"
        f"```{{dropdown}} Why our plans are off, and what we could not plan\n{lines}\n```\n"
    )


def _why_nvidias_differ() -> str:
    """Return what their share of operations says: with more operations in Newton–Schulz our plans grow as much."""
    theirs = [100 * figure.published for figure in OPERATIONS]
    ours = [100 * figure.planned() for figure in OPERATIONS]
    grown = [100 * FIGURES[at].planned() * theirs[at] / ours[at] for at in range(len(OPERATIONS))]
    return (
        "In NVIDIA's two runs Newton–Schulz is {:.1f} and {:.1f} % of the operations of forward and backward, and in "
        "our plans {:.1f} and {:.1f} %. Newton–Schulz does not depend on the tokens, but the passes do, so they may "
        "have about a third of ours, or they count matrices that we do not. Either way our plans become {:.1f} and "
        "{:.1f} %, so the second comes close, and the first was luck."
    ).format(*theirs, *ours, *grown)


def _why_dmuons_differ() -> str:
    everywhere, owner, alone = FIGURES[2:5]
    theirs, ours = (1000 * DMUON_ADAMW * share for share in (owner.published, owner.planned()))
    return (
        f"With one owner per matrix Muon adds {theirs:.0f} milliseconds by DMuon's figures and {ours:.0f} by our plan, "
        "in which a GPU needs that long for one of the largest matrices, and nothing hides it. DMuon's other figures "
        f"do not fit each other, because Newton–Schulz alone takes {alone.published:.2f} s, but a step with all of it "
        f"is only {DMUON_ADAMW * everywhere.published:.2f} s longer than AdamW's."
    )


def _value(figure: Published, value: float) -> str:
    return f"{value:.2f} s" if figure.what == TIMED else f"{100 * value:.3g} %"
