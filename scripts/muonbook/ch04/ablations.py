"""What there is to see beside the race: one study per question, all on the language.

Every study starts from the settings that the race tuned, changes one thing, and retunes the learning rate wherever the
change could ask for another. Tuned on seeds of their own, reported on the race's; gaps are losses above the floor, in
nats per letter. `measure` runs all of them; all it returns is plain data, which `sight_tables` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from distmuon.launch import World
from muonbook.ch04 import spectra
from muonbook.ch04.baselines import Setting
from muonbook.ch04.runs import ROUTES, Finding, Lab, Retuned, Trial, retune
from muonbook.ch04.sweep import RACE_SEEDS, TUNING_SEEDS

Best = Mapping[str, Setting]  # {"sgd", "adamw", "muon"}: tuned on the language at its default steps
GRAMMAR_SEED = 7  # of the language that a model is fine-tuned on
DECAYS = (0.0, 0.1)
PAIR = ("adamw", "muon")


@dataclass(frozen=True)
class Scale:
    """How much is done.

    long: times as many steps, in the study of weight decay. windows: that every run of the batch study reads.
    farthest: see `trials.retune`.
    """

    steps: int = 300
    long: int = 3
    finetuning: int = 100
    windows: int = 4800
    batches: tuple[int, ...] = (4, 16, 64)
    levels: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.8)
    retuned_levels: tuple[float, ...] = (0.05, 0.2, 0.8)
    spectra_seeds: Sequence[int] = RACE_SEEDS[:3]
    seeds: Sequence[int] = RACE_SEEDS[:5]
    tuning: Sequence[int] = TUNING_SEEDS[:2]
    farthest: int = 3


FULL = Scale()
QUICK = Scale(
    steps=1,
    long=2,
    finetuning=1,
    windows=16,
    batches=(4, 16),
    levels=(0.05, 0.2),
    retuned_levels=(0.05, 0.2),
    spectra_seeds=RACE_SEEDS[:1],
    seeds=RACE_SEEDS[:2],
    tuning=TUNING_SEEDS[:1],
    farthest=0,
)


def measure(world: World, best: Best, quick: bool = False, scale: Scale | None = None) -> dict[str, Any]:
    """Run every study; return {study: its data, "best": the settings}. Collective; every rank gets everything.

    quick: the same shape of data in seconds, which says nothing about any optimizer. scale: instead of either.
    """
    lab, size = Lab(world), scale or (QUICK if quick else FULL)
    data: dict[str, Any] = {"best": {name: asdict(setting) for name, setting in best.items()}}
    data["spectra"] = spectra.study(world, best, size.spectra_seeds, size.steps)
    world.say("spectra: done")
    # fine-tuning first: its pretrained models are trials that other studies ask for as well
    for name, study in STUDIES.items():
        data[name] = study(lab, best, size)
        world.say(f"{name}: done")
    return data


def raced(lab: Lab, trials: Sequence[Trial], seeds: Sequence[int]) -> list[list[Finding]]:
    """Return what was found, [trial][seed]."""
    found = lab.find([trial.at(trial.setting.lr, seed) for trial in trials for seed in seeds])
    return [found[n * len(seeds) :][: len(seeds)] for n in range(len(trials))]


def gaps(found: Sequence[Finding]) -> list[float]:
    return [one.gap for one in found]


def _start(best: Best, name: str, size: Scale) -> Trial:
    return Trial(best[name], size.seeds[0], size.steps)


def _tuned_rows(lab: Lab, trials: Mapping[tuple[Any, ...], Trial], keys: Sequence[str], size: Scale) -> list[dict]:
    """Retune and race trials; return one row each: what it is called, what tuning found, and its gaps by seed."""
    tuned: dict[tuple[Any, ...], Retuned] = retune(lab, trials, size.tuning, size.farthest)
    found = raced(lab, [one.best for one in tuned.values()], size.seeds)
    return [
        dict(zip(keys, name, strict=True)) | one.stored() | {"gaps": gaps(runs)}
        for (name, one), runs in zip(tuned.items(), found, strict=True)
    ]


# ---- The studies ------------------------------------------------------------------------------------------


def finetune(lab: Lab, best: Best, size: Scale) -> dict[str, Any]:
    """Pretrain with one optimizer, go on with another on another grammar (Moonlight, table 7)."""
    pretrained = {name: _start(best, name, size) for name in PAIR}
    pairs = {
        (first, second): Trial(
            best[second], size.seeds[0], size.finetuning, grammar_seed=GRAMMAR_SEED, before=pretrained[first]
        )
        for first in PAIR
        for second in PAIR
    }
    rows = _tuned_rows(lab, pairs, ("pretrained", "optimizer"), size)
    before = dict(zip(PAIR, raced(lab, list(pretrained.values()), size.seeds), strict=True))
    return {
        "pretraining_steps": size.steps,
        "steps": size.finetuning,
        "grammar_seed": GRAMMAR_SEED,
        "pretrained": {name: gaps(found) for name, found in before.items()},
        "rows": rows,
    }


def update_rms(lab: Lab, best: Best, size: Scale) -> dict[str, Any]:
    """Set the RMS of Muon's update, all else unchanged (Moonlight, table 8); then retune the learning rate for each.

    The learning rate is that of AdamW's part too, so what retuning cannot give back is due to their ratio.
    """
    start = _start(best, "muon", size)
    found = raced(lab, [replace(start, rms=level) for level in size.levels], size.seeds)
    rows = [{"rms": level, "gaps": gaps(runs)} for level, runs in zip(size.levels, found, strict=True)]
    tuned = {(level,): replace(start, rms=level) for level in size.retuned_levels}
    return {"lr": start.setting.lr, "rows": rows, "tuned": _tuned_rows(lab, tuned, ("rms",), size)}


def decay(lab: Lab, best: Best, size: Scale) -> dict[str, Any]:
    """With weight decay and without, at the race's length and much longer (Moonlight, figure 2).

    The long runs choose between the best learning rate and half of it on one tuning seed. Also stored: the spectral
    norm and the RMS of the watched matrix at the end, by seed, and along the way of the first seed.
    """
    cases = {
        (name, steps, rate): replace(
            _start(best, name, size), steps=steps, setting=replace(best[name], weight_decay=rate)
        )
        for name in PAIR
        for steps in (size.steps, size.long * size.steps)
        for rate in DECAYS
    }
    choices = {key: [best[key[0]].lr / 2, best[key[0]].lr] for key in cases if key[1] > size.steps}
    seed = size.tuning[0]
    tried = iter(lab.gaps([cases[key].at(lr, seed) for key, lrs in choices.items() for lr in lrs]))
    tuning = {key: [next(tried) for _ in lrs] for key, lrs in choices.items()}
    chosen = [
        case.at(choices[key][tuning[key].index(min(tuning[key]))], case.seed) if key in choices else case
        for key, case in cases.items()
    ]
    found = raced(lab, chosen, size.seeds)
    rows = [
        {"optimizer": name, "steps": steps, "weight_decay": rate, "lr": trial.setting.lr}
        | {"lrs": choices.get((name, steps, rate), []), "tuning": tuning.get((name, steps, rate), [])}
        | {"gaps": gaps(runs), "spectral": [one.spectral[-1] for one in runs], "sizes": [one.rms[-1] for one in runs]}
        | {"on_the_way": runs[0]._asdict()}
        for (name, steps, rate), trial, runs in zip(cases, chosen, found, strict=True)
    ]
    return {"rows": rows}


def routing(lab: Lab, best: Best, size: Scale) -> dict[str, Any]:
    """Give Muon the hidden matrices only, as the paper does, or also those that it leaves to AdamW."""
    start = _start(best, "muon", size)
    return {"rows": _tuned_rows(lab, {(route,): replace(start, route=route) for route in ROUTES}, ("route",), size)}


def batch(lab: Lab, best: Best, size: Scale) -> dict[str, Any]:
    """Read the same windows in small batches and in large ones: many steps, or few."""
    trials = {
        (name, windows): replace(_start(best, name, size), batch=windows, steps=size.windows // windows)
        for windows in size.batches
        for name in PAIR
    }
    rows = _tuned_rows(lab, trials, ("optimizer", "batch"), size)
    for row in rows:
        row["steps"] = size.windows // row["batch"]
    return {"windows": size.windows, "rows": rows}


STUDIES = {"finetune": finetune, "rms": update_rms, "decay": decay, "routing": routing, "batch": batch}
