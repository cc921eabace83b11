"""What Llama 2 7B takes of a GPU's memory in training: the picture of the accounting page."""

from __future__ import annotations

import math

from matplotlib.figure import Figure

from muonbook.figures import plots
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.parts.activations import StageActivations
from muonbook.planner.stages import Degrees, stages

GPUS = 8
STATES = {"weights": 2, "gradients": 4, "masters": 4, "moments": 8}  # bytes for each parameter, with AdamW
SHARDED = ("masters", "moments")  # by ZeRO-1
TITLE = "Llama 2 7B in the memory of one GPU"
NOTE = "One sequence of 4,096 tokens on each GPU, in bf16 with AdamW. The dashes mark 80 GB."


def rows() -> dict[str, dict[str, float]]:
    """Return case -> {part: bytes}."""
    shape = MODELS["llama2_7b"]
    (stage,) = stages(shape, 1, 1)
    parameters = sum(math.prod(weight.shape) for weight in shape.weights())
    made = {}
    for gpus, where in ((1, "one GPU"), (GPUS, f"one of {GPUS}, with ZeRO-1")):
        states = {part: each * parameters / (gpus if part in SHARDED else 1) for part, each in STATES.items()}
        for recompute, how in ((False, ""), (True, ", blocks recomputed")):
            left = StageActivations(shape, stage, Degrees(1), recompute, sequence_parallel=False).held_bytes(1)
            made[where + how] = states | {"activations": left}
    return made


def draw() -> tuple[Figure, str]:
    """Return the picture and its alt text."""
    made = rows()
    return plots.draw_bars(made, TITLE, NOTE, level=80e9), f"{plots.describe_bars(made, TITLE)} {NOTE}"
