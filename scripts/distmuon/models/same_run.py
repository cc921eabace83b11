"""What a checkpoint of `train.py` says of the run that it belongs to, and what may differ when that run goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distmuon.extras.checkpoint.files import CheckpointError
from distmuon.launch.cli import option_of
from distmuon.models.corpus import Corpus
from distmuon.models.run_settings import RunSettings

# settings that may not change, because it would be another run; nor may the text: see `Corpus.sha256`
FIXED = ("width", "layers", "heads", "context", "optimizer", "batch", "seed")
# and those that may, because one lengthens a run or lowers its rate on purpose; it then says from what to what
RATE = ("lr", "schedule", "warmup", "steps")
STEERING = (*RATE, "weight_decay", "clip", "dtype", "sharding", "strategy")


def notes_of(settings: RunSettings, text: Corpus, step: int) -> dict[str, Any]:
    """Return what is saved beside the tensors."""
    kept = {name: getattr(settings, name) for name in (*FIXED, *STEERING)}
    return {"step": step, "settings": kept, "text": _description(settings, text)}


def is_ours(notes: Mapping[str, Any]) -> bool:
    """Return whether `train.py` has made a checkpoint with these notes."""
    return {"settings", "text"} <= notes.keys()


def settings_then(settings: RunSettings, notes: Mapping[str, Any]) -> RunSettings:
    """Return the settings with which a checkpoint was made; of what changes nothing in a run, today's."""
    return RunSettings(**vars(settings) | notes["settings"])


def check_same_run(settings: RunSettings, text: Corpus, notes: Mapping[str, Any], step: int) -> None:
    """Raise CheckpointError, with the remedy, where going on from the checkpoint of this step would be another run."""
    run = f"the run in {settings.folder}"
    if not is_ours(notes):
        raise CheckpointError(f"{run} is another program's; give another --folder.")
    for option, old, new in _changes(FIXED, settings_then(settings, notes), settings):
        raise CheckpointError(
            f"{run} cannot go on with {option} {new} instead of {old}; give the same, or another --folder."
        )
    here = _description(settings, text)
    then = notes["text"]
    if then["sha256"] != here["sha256"]:
        texts = [f"{one['name']} ({one['tokens']:,} tokens, {one['sha256'][:8]}…)" for one in (then, here)]
        raise CheckpointError(
            f"{run} was trained on {texts[0]}, and this is another text, {texts[1]}; give the same, or another "
            "--folder."
        )
    if step > settings.steps:
        raise CheckpointError(
            f"{run} has made {step} steps, and --steps {settings.steps} asks for fewer; ask for more, or give another "
            "--folder."
        )


def what_differs(settings: RunSettings, notes: Mapping[str, Any], step: int) -> Iterator[str]:
    """Yield a line for each thing by which the rest of the run will differ from what was begun."""
    then = settings_then(settings, notes)
    for option, old, new in _changes(STEERING, then, settings):
        yield f"{option} is {new} now, was {old}"
    if _changes(RATE, then, settings) and step < settings.steps:
        yield f"learning rate {then.lr_at(step):.3g} in step {step}, {settings.lr_at(step + 1):.3g} in step {step + 1}"
    if step == settings.steps:
        yield f"was the last of --steps {step}, so there is nothing left to do; give more --steps to go on"


def _changes(names: Sequence[str], then: RunSettings, now: RunSettings) -> list[tuple[str, Any, Any]]:
    """Return (option, its value then, its value now) of the settings that differ."""
    all_of_them = [(option_of(name), getattr(then, name), getattr(now, name)) for name in names]
    return [(option, old, new) for option, old, new in all_of_them if old != new]


def _description(settings: RunSettings, text: Corpus) -> dict[str, Any]:
    """Return what tells a text from another one, whatever either is called, and what a prompt may be made of."""
    return {"name": settings.text, "tokens": len(text), "sha256": text.sha256, "known": text.known}
