"""What `study` found, as lines of text; beside it, for the same images, what the tutorial reports."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from muonbook.ch04.image_datasets import SOURCES, not_run_lines
from muonbook.ch04.sweep import Verdict, span, verdict
from muonbook.ch04.tutorial.recipes import RECIPES, Reported, TutorialRecipe

MEASURES: dict[str, Callable[[dict[str, Any]], float]] = {  # the smaller the better
    "training loss": lambda run: run["training_loss"][-1],
    "test loss": lambda run: run["test_loss"][-1],
    "test error": lambda run: 1 - run["test_accuracy"][-1],
}
PAIRS = {
    "as_written": [("muon", "adamw"), ("muon", "sgd"), ("muon", "sgd_momentum")],
    "tuned": [
        ("muon", "adamw"),
        ("muon", "sgd"),
        ("muon", "sgd_momentum"),
        ("muon_adamw", "adamw"),
        ("muon_adamw", "sgd_momentum"),
        ("muon_adamw", "muon"),
    ],
}
RACES = {"as_written": "As written", "tuned": "Tuned"}
WIDTHS = (12, 23, 20, 17)  # with two spaces between: 78


class PairVerdicts(NamedTuple):
    """Two optimizers of one race, seed by seed. verdicts: by the names of MEASURES."""

    race: str
    first: str
    second: str
    verdicts: dict[str, Verdict]


def verdicts(found: dict[str, Any]) -> list[PairVerdicts]:
    """Compare all PAIRS that ran. found: of one data set, see `study.study_of`."""
    return [
        PairVerdicts(race, first, second, _verdicts(found[race][first], found[race][second]))
        for race, pairs in PAIRS.items()
        for first, second in pairs
        if first in found[race] and second in found[race]
    ]


def _verdicts(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> dict[str, Verdict]:
    return {name: verdict([of(run) for run in first], [of(run) for run in second]) for name, of in MEASURES.items()}


def lines(data: dict[str, Any]) -> list[str]:
    """Return the tables of all data sets, at most 78 characters wide. data: what `study.study` returns."""
    told = []
    for name, found in data.items():
        told += ["", *(not_run_lines(name) if "missing" in found else _tables(name, found))]
    return told[1:]


def _tables(name: str, found: dict[str, Any]) -> Iterator[str]:
    recipe, same = RECIPES[found["recipe"]], name == found["recipe"]
    seeds, steps = len(found["as_written"]["muon"]), found["as_written"]["muon"][0]["steps"]
    epochs = f"{found['epochs']} epoch{'s' * (found['epochs'] > 1)}"
    whose = "" if same else f", by {SOURCES[found['recipe']].title}'s recipe"
    yield f"{SOURCES[name].title}{whose}: {found['images']:,} images, {steps:,} steps in {epochs}"
    yield f"Medians of {seeds} seeds [least, greatest]. Training loss: mean over the last epoch."
    for race, title in RACES.items():
        yield ""
        yield _row(title, "training loss", "test loss", "test accuracy, %")
        for optimizer, of in found[race].items():
            yield _row(recipe.optimizers[optimizer].title, *_medians(of))
            if same and race == "as_written":
                yield _row("  reported", *_reported(recipe.reported[optimizer]))
    yield from ("", *_wins(recipe, found), "", *_rates(recipe, found), *_remarks(recipe, found, same))


def _row(*cells: str) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def _medians(runs: list[dict[str, Any]]) -> list[str]:
    training, loss, error = ([of(run) for run in runs] for of in MEASURES.values())
    right = span([100 * (1 - e) for e in error], 1).replace("100.0", "100")  # or the line would be too long
    return [span(training, 4), span(loss, 3), right]


def _reported(reported: Reported) -> list[str]:
    accuracy = "" if reported.test_accuracy is None else f"{100 * reported.test_accuracy:.1f}"
    return [f"{reported.training_loss:.4f}", "not looked at" if not accuracy else "", accuracy]


def _wins(recipe: TutorialRecipe, found: dict[str, Any]) -> Iterator[str]:
    """Yield wins and losses of the first over the seeds; * where that may be claimed."""
    yield f"{'Seeds won - lost by the first':<36}" + "".join(f"{name:>14}" for name in MEASURES)
    for race, first, second, by in verdicts(found):
        names = " : ".join(recipe.optimizers[name].title for name in (first, second))
        cells = (f"{v.wins} - {v.losses}{' *' if v.claimed else '  '}" for v in by.values())
        yield (f"{'tuned ' * (race == 'tuned')}{names}".ljust(36) + "".join(f"{cell:>14}" for cell in cells)).rstrip()
    yield "* claimed: the same one wins on every seed, and there are at least 5"


def _rates(recipe: TutorialRecipe, found: dict[str, Any]) -> Iterator[str]:
    """Yield which learning rates were tried, and found."""
    yield f"{'Learning rates':<14}{'as written':>12}{'tuned':>12}   out of"
    for name, optimizer in recipe.optimizers.items():
        tried = [entry["lr"] for entry in found["tuning"][name]]
        written = f"{optimizer.lr:g}" if optimizer.written else "-"
        of = f"{len(tried)} from {min(tried):g} to {max(tried):g}"
        yield f"{optimizer.title:<14}{written:>12}{found['tuned'][name][0]['lr']:>12g}   {of}"
    yield f"Tuned on {found['held_out']:,} held-out training images, on other seeds; the rates double."


def _remarks(recipe: TutorialRecipe, found: dict[str, Any], same: bool) -> Iterator[str]:
    muon, adamw = (
        statistics.median(run["training_loss"][-1] for run in found["as_written"][name]) for name in ("muon", "adamw")
    )
    theirs = recipe.reported["muon"].training_loss / recipe.reported["adamw"].training_loss - 1
    where = "the same images" if same else f"{SOURCES[found['recipe']].title}, one run"
    yield "Muon's training loss as written, against AdamW's:"
    yield f"  {100 * (muon / adamw - 1):+.0f} % here; {100 * theirs:+.0f} % in the tutorial ({where})"
    network, update = found["flops"]["network"], found["flops"]["muon"]
    yield f"One step's products: network {network / 1e6:,.0f} MFLOP; Muon's update {update / 1e6:,.0f} MFLOP,"
    yield f"  {update / network:.1f} times as much; AdamW's and SGD's have none."
    if recipe.reported_time is not None:
        yield f"  In the tutorial, on an A100, Muon's run took {recipe.reported_time:.2f} times as long as AdamW's."
