"""Try all published coefficients of Newton–Schulz, in every form, in half precision, on chapter 16's spectra.

What each costs is counted, and timed in turns in float32, which every processor multiplies at full speed.
"""

from muonbook.measure import interleaved_timing, results

SHAPES, QUICK_SHAPES = ((256, 512), (384, 384)), ((48, 96),)  # a CPU multiplies float16 slowly
TIMED = ((512, 512), (512, 2048))
HALF_ERROR = 0.03  # which nobody minds
RANK_ONE = "rank 1"


def forms():
    """Return name -> how (X in float32 with norm 1, coefficients) is iterated in half precision."""
    import torch

    from distmuon.optim.gram import HALF_SCALE, gram_iterate_, half_gram_iterate
    from distmuon.optim.newton_schulz import _iterate

    return {
        "standard, bf16": lambda x, coefficients: _iterate(x.bfloat16(), coefficients),
        "centred Gram, bf16": lambda x, coefficients: gram_iterate_(x.bfloat16(), coefficients),
        "Gram, fp16": lambda x, coefficients: half_gram_iterate((HALF_SCALE * x).to(torch.float16), coefficients),
        "Gram, fp16, restart as published": lambda x, coefficients: half_gram_iterate(
            (HALF_SCALE * x).to(torch.float16), coefficients, restarts={2}
        ),
        "Gram, bf16": lambda x, coefficients: half_gram_iterate((HALF_SCALE * x).bfloat16(), coefficients),
    }


def published():
    """Return name -> its quintics, as many as it is used with. The last is that of the published Gram form."""
    from distmuon.optim.coefficients import AS_A_WHOLE, COEFFICIENTS, POLAR_EXPRESS, quintics

    found = {name: quintics(name, len(COEFFICIENTS[name]) if name in AS_A_WHOLE else 5) for name in COEFFICIENTS}
    found["polar_express, 1.05"] = [(a / 1.05, b / 1.05**3, c / 1.05**5) for a, b, c in POLAR_EXPRESS[:5]]
    return found


def errors(*shapes):
    """Return {name: {form: {(spectrum, shape): error}}}, relative in the Frobenius norm to float64."""
    found: dict = {name: {form: {} for form in forms()} for name in published()}
    for shape in shapes:
        for name, by_form in errors_of(shape).items():
            for form, by_spectrum in by_form.items():
                found[name][form] |= {(spectrum, shape): error for spectrum, error in by_spectrum.items()}
    return found


def errors_of(shape):
    """Return {name: {form: {spectrum: error}}} for matrices of one shape."""
    import torch

    from distmuon.optim.newton_schulz import unit_frobenius_
    from tools.spectra import spectra

    m, n = shape
    draw = torch.Generator().manual_seed(m + n)
    u, v = (torch.linalg.qr(torch.randn(k, m, generator=draw, dtype=torch.float64)).Q for k in (m, n))
    found: dict = {name: {form: {} for form in forms()} for name in published()}
    for spectrum, values in spectra(m).items():
        x = unit_frobenius_((u * values) @ v.mT).float()
        for name, coefficients in published().items():
            exact = values / values.norm()
            for a, b, c in coefficients:
                exact = a * exact + b * exact**3 + c * exact**5
            wanted = (u * exact) @ v.mT
            for form, iterate in forms().items():
                error = float((iterate(x, coefficients).double() - wanted).norm() / exact.norm())
                found[name][form][spectrum] = error if error < float("inf") else None
    return found


def judged(found):
    """Return rows of a table: how many spectra each form fails, and its worst error but for the matrix of rank 1.

    It fails where it errs by more than half again what the standard form in bf16 does, and by more than HALF_ERROR.
    """
    rows = []
    for name, by_form in found.items():
        standard = by_form["standard, bf16"]
        for form, by_spectrum in by_form.items():
            failed = [
                spectrum
                for spectrum, error in by_spectrum.items()
                if error is None or error > max(1.5 * standard[spectrum], HALF_ERROR)
            ]
            rows.append(
                {
                    "coefficients": name,
                    "form": form,
                    "spectra": len(by_spectrum),
                    "fails": len(failed),
                    "failed": [f"{spectrum}, {m} x {n}" for spectrum, (m, n) in failed],
                    "rank_one": next(error for (spectrum, _), error in by_spectrum.items() if spectrum == RANK_ONE),
                }
            )
    return rows


def costs(rounds):
    """Return {name: steps, products, operations of [1024, 4096], seconds over Jordan's}, in the standard form."""
    import torch

    from distmuon.optim.newton_schulz import flops

    found: dict = {}
    for name, coefficients in published().items():
        found[name] = {
            "steps": len(coefficients),
            "products": sum(2 + (c != 0) for _, _, c in coefficients),
            "flops": flops((1024, 4096), len(coefficients), coefficients=coefficients),
        }
    for shape in TIMED:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        seconds = interleaved_timing.take_turns({name: act(x, name) for name in found}, rounds)
        for name in found:
            ratio = interleaved_timing.ratios(seconds[name], seconds["muon"])
            found[name][f"time {shape[0]}x{shape[1]}"] = results.spread(ratio)
    return found


def act(x, name):
    """Return what orthogonalizes this matrix once."""
    import torch

    from distmuon.optim.newton_schulz import newton_schulz

    coefficients = published()[name]
    return lambda: newton_schulz(x, len(coefficients), coefficients, compute_dtype=torch.float32, form="standard")


def measure(quick):
    """Return what `make bench` stores. quick: small matrices and few rounds."""
    shapes = QUICK_SHAPES if quick else SHAPES
    rows, taken = judged(errors(*shapes)), costs(3 if quick else 30)
    return {"shapes": [list(shape) for shape in shapes], "rows": rows, "costs": taken}
