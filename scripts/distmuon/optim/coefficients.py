"""The numbers (a, b, c) of Newton–Schulz, step by step: published ones by name, or anybody's own.

Sources: Muon (Jordan et al. 2024), which torch.optim.Muon follows; the others stand with their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Quintic = tuple[float, float, float]
Coefficients = str | Quintic | Sequence[Quintic]  # see `quintics`

MUON: Quintic = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: the steepest slope at 0 that still stays near 1

POLISH: Quintic = (2.0, -1.5, 0.5)  # DeepSeek-V4's last: p(1) = 1 and flat there, so what is near 1 comes nearer

# Amsel et al. 2025, arXiv 2505.16932: step k is the best quintic for the interval that step k - 1 leaves of [1e-3, 1].
POLAR_EXPRESS: tuple[Quintic, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),  # from here on: Newton–Schulz's own quintic, which only polishes
)
POLAR_EXPRESS_SAFETY = 1.01  # p(x / 1.01) keeps rounding from pushing a value out of the interval (same source)

# Grishina et al. 2025, arXiv 2506.10935: the same aim by Remez's algorithm, on an interval that adapts; the numbers as
# NVIDIA's Emerging-Optimizers rounds them.
CANS: tuple[Quintic, ...] = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)
# arXiv 2606.00371: five cubics for a band around 1 that is about as wide as the one Jordan's quintics leave.
CUBIC5: tuple[Quintic, ...] = (
    (3.3656576, -3.3420992, 0.0),
    (2.5744352, -1.4957376, 0.0),
    (2.5368962, -1.4312570, 0.0),
    (2.4418906, -1.2764040, 0.0),
    (2.2230472, -0.9630650, 0.0),
)
COEFFICIENTS: dict[str, Sequence[Quintic]] = {  # by name; the last quintic is repeated where that is no loss
    "muon": (MUON,),  # torch.optim.Muon's as well
    "polar_express": tuple(
        (a / POLAR_EXPRESS_SAFETY, b / POLAR_EXPRESS_SAFETY**3, c / POLAR_EXPRESS_SAFETY**5)
        for a, b, c in POLAR_EXPRESS[:-1]
    )
    + POLAR_EXPRESS[-1:],
    "cans": CANS,
    "deepseek_v4": (MUON,) * 8 + (POLISH,) * 2,  # DeepSeek-V4 (2026): wide open first, then near 1
    "cubic5": CUBIC5,
}
AS_A_WHOLE = ("deepseek_v4", "cubic5")  # of no use in part: their last steps are made for what the others leave


def quintics(coefficients: Coefficients, steps: int) -> list[Quintic]:
    """Return the `steps` quintics (a, b, c) that a run of Newton–Schulz applies.

    coefficients: a name of `COEFFICIENTS`, one (a, b, c) used in every step, or a sequence of them, whose last one is
        repeated if the steps outnumber it.
    Raises TypeError for a number of steps that is not whole; ValueError for an unknown name, an empty sequence, a
    negative number of steps, or another number of steps than those have that are of no use in part.
    """
    if not hasattr(steps, "__index__") or hasattr(steps, "__len__"):
        raise TypeError(f"steps is {steps!r}; Newton–Schulz needs a whole number, such as 5.")
    if steps < 0:
        raise ValueError(f"steps is {steps}; Newton–Schulz needs 0 or more.")
    if (
        isinstance(coefficients, str)
        and coefficients in AS_A_WHOLE
        and steps != (whole := len(COEFFICIENTS[coefficients]))
    ):
        raise ValueError(f"{coefficients!r} is made for {whole} steps, and steps is {steps}; give {whole}.")
    rows: Any = COEFFICIENTS.get(coefficients) if isinstance(coefficients, str) else coefficients
    if not isinstance(rows, Sequence) or not rows:
        raise ValueError(
            f"coefficients are {coefficients!r}; give one of {', '.join(COEFFICIENTS)} or numbers (a, b, c)."
        )
    rows = [rows] if isinstance(rows[0], int | float) else rows
    if not all(_is_quintic(row) for row in rows):
        raise ValueError(
            f"coefficients are {coefficients!r}; every quintic has exactly three numbers (a, b, c), and finite ones."
        )
    polynomials: list[Quintic] = [(float(row[0]), float(row[1]), float(row[2])) for row in rows]
    return (polynomials + [polynomials[-1]] * steps)[:steps]


def _is_quintic(row: Any) -> bool:
    try:
        return len(row) == 3 and all(not isinstance(x, str) and math.isfinite(x) for x in row)
    except (TypeError, ValueError, RuntimeError):  # no row, or no numbers in it
        return False
