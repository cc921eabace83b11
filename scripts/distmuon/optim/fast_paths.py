"""What Newton–Schulz takes where it is left to us: the dtype, the form and the batches that are fast on this hardware.

Nothing here computes. Each rule was fitted to measurements, which its docstring names; a rule looks at shapes, dtypes
and the device, never at values, so that all ranks decide alike.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch

from distmuon.optim.coefficients import Quintic
from distmuon.optim.gram import KERNEL_FROM, gram_work, half_gram_work, is_hopper

BATCHED_ON_CPU, BATCHED_ON_GPU = 2**17, 2**22  # elements: see `batching_pays`
BATCH = 2**25  # elements in one batch at most: more of them gain no time, and take memory

# How many floating-point operations take as long as starting one kernel, fitted to two CPUs. A matrix unit makes only
# products faster, so a start is worth more of them.
START = {"cpu": 2e7, "matrix unit": 2e8}

STEEPEST = 8.25  # slope at 0 of a quintic that the Gram forms bear in half precision; CANS's 8.47 fails on some spectra


def fast_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that "auto" computes in, for an input of `dtype` on `device`.

    float64 stays float64, because whoever asks for it wants the digits. Everything else is
    computed in bf16 where the hardware multiplies bf16 natively (a GPU since Ampere; a CPU
    with AVX512-BF16 or AMX, and oneDNN permitted to use it), and in fp32 elsewhere: emulated bf16
    is slower than fp32. fp16 is chosen for the Gram form alone, on GPUs: see `half_gram_pays`.
    """
    if dtype == torch.float64:
        return torch.float64
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    elif device.type == "cpu":
        fast = _may_use("avx512_bf16", "BF16", "FP16", "AMX", "AVX10") or has_matrix_unit()
    else:
        fast = False
    return torch.bfloat16 if fast else torch.float32


def fast_form(shape: Sequence[int], polynomials: Sequence[Quintic], dtype: torch.dtype, device: torch.device) -> str:
    """Return the form that "auto" takes for matrices of `shape` [A, B]: the one that costs less, by a simple model.

    An operation costs 1, and the start of a product, or of anything between two, `START`: the Gram form has fewer of
    the former and more of the latter, which cost most where products are fast. float64 stays standard, because those
    who ask for it want the digits, and so do squares and small sides, where little can be gained, and coefficients that
    are too steep for the Gram form in bf16. On a GPU the centred form gained nothing at any shape that
    `tests/gpu/one_gpu.py` has measured; the one in float16 did, see `half_gram_pays`.
    """
    a, b = min(shape), max(shape)
    if dtype == torch.bfloat16 and _too_steep(polynomials):
        return "standard"
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32) or a < 256 or a == b:
        return "standard"
    start = START["matrix unit" if dtype == torch.bfloat16 and has_matrix_unit() else "cpu"]
    gram, calls = gram_work(a, b, polynomials)
    standard, products = standard_work(a, b, polynomials)
    return "gram" if gram + start * calls < standard + start * products else "standard"


def half_gram_pays(shape: Sequence[int], polynomials: Sequence[Quintic], device: torch.device) -> bool:
    """Return whether "auto" computes matrices of `shape` [..., A, B] in the Gram form and float16, instead of bf16.

    On GPUs on which that was measured, and where its operations alone should take less than 0.8 of the time. They take
    longer than it takes to start them where our kernel pays, or where matrices are small enough to come in batches;
    between the two, starts decide, and the standard form has fewer. It depends on the shape of one matrix and not on
    how many there are, so that all ranks do the same to all matrices.
    """
    a, b = sorted(shape[-2:])
    if a < 1024 or not polynomials or _too_steep(polynomials) or not is_hopper(device):
        return False
    if a * b > BATCHED_ON_GPU and a * a * b < KERNEL_FROM:
        return False
    return half_gram_work(a, b, polynomials) < 0.8 * standard_work(a, b, polynomials)[0]


def _too_steep(polynomials: Sequence[Quintic]) -> bool:
    return any(slope > STEEPEST for slope, _, _ in polynomials)


def has_matrix_unit() -> bool:
    """Return whether this CPU multiplies bf16 matrices in a unit of their own (AMX), and oneDNN may use it."""
    return _may_use("amx_bf16", "AMX")


def _may_use(feature: str, *permitting: str) -> bool:
    """Return whether this CPU has a feature, and oneDNN, which multiplies bf16 for torch, may use it.

    permitting: parts of the names of those limits (ONEDNN_MAX_CPU_ISA, formerly DNNL_MAX_CPU_ISA) that permit it.
    """
    limit = (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "ALL").upper()
    permitted = limit in ("ALL", "DEFAULT") or any(part in limit for part in permitting)
    return permitted and bool(torch.cpu.get_capabilities().get(feature))


# What torch.compiler.assume_constant_result sets, without the second that importing the compiler takes.
_may_use._dynamo_marked_constant = True  # type: ignore[attr-defined]


def batching_pays(shape: Sequence[int], device: torch.device) -> bool:
    """Return whether several matrices of this shape [A, B] run faster as one batched product than one after the other.

    Small products are dominated by the cost of launching them. Large ones gain nothing, and stacking them is a copy:
    on one H200 batches took 0.2 of the time at 1024 x 1024, 0.6 at 1024 x 4096, and 0.95 at 4096 x 4096.
    """
    return math.prod(shape) <= (BATCHED_ON_GPU if device.type == "cuda" else BATCHED_ON_CPU)


def standard_work(a: int, b: int, polynomials: Sequence[Quintic]) -> tuple[int, int]:
    """Return the floating-point operations of the standard form for one [a, b], a <= b, and how many products."""
    squares = sum(c != 0 for _, _, c in polynomials)
    return len(polynomials) * 4 * a * a * b + squares * 2 * a**3, 2 * len(polynomials) + squares
