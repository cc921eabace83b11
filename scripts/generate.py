"""Let a model that train.py has trained write: text from the newest checkpoint of a run, or from one of its steps.

python scripts/generate.py out/alice
python scripts/generate.py out/alice --prompt "Alice was " --length 400 --temperature 0.7
python scripts/generate.py out/alice/step-000100 --seed 1

It takes one process, whatever grid has trained the model. The same options write the same text.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distmuon import checkpoint, launch
from distmuon.extras.checkpoint.manifest import MANIFEST
from distmuon.models.corpus import decode, encode
from distmuon.models.networks import Transformer
from distmuon.models.run_settings import RunSettings
from distmuon.models.same_run import is_ours, settings_then

BEGIN = " "  # what the model reads first where there is no prompt


def load(folder: Path, device: str) -> tuple[Transformer, dict[str, Any]]:
    """Return the model of a checkpoint, whole and in float32, and the checkpoint's notes.

    Raises CheckpointError where it is damaged; UsageError where train.py has not made it.
    """
    notes, weights = checkpoint.notes(folder), checkpoint.weights(folder)
    if not is_ours(notes):
        raise launch.UsageError(f"{folder} is no checkpoint of train.py; name the --folder of a run of it.")
    settings = settings_then(RunSettings(), notes)
    model = Transformer(*settings.shape(len(weights["tokens.weight"])))
    model.load_state_dict(weights)
    return model.to(device), notes


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: Tensor,  # [tokens], int64
    length: int,
    temperature: float,
    seed: int,
) -> Tensor:  # [length], int64
    """Return `length` tokens that follow the prompt, each drawn from what the model expects after those before it.

    temperature: by which the logits are divided; 0: always the token that is expected most.
    """
    generator = torch.Generator().manual_seed(seed)
    context, device = model.positions.num_embeddings, model.positions.weight.device
    tokens = prompt
    for _ in range(length):
        logits = model(tokens[None, -context:].to(device))[0, -1].double().cpu()
        if temperature == 0:
            following = logits.argmax().view(1)
        else:
            following = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        tokens = torch.cat([tokens, following])
    return tokens[len(prompt) :]


def newest(folder: str) -> Path:
    """Return the newest checkpoint of a run's folder, or the folder itself, if it is a checkpoint.

    Raises UsageError where there is none.
    """
    place = Path(folder).expanduser()
    if (place / MANIFEST).exists():
        return place
    if steps := checkpoint.saved_steps(place):
        return checkpoint.at_step(place, steps[0])
    found = "there is no checkpoint in it" if place.is_dir() else "there is no such folder"
    raise launch.UsageError(f"{folder}: {found}; name the --folder of a run of train.py, or one of its steps in it.")


def parse() -> argparse.Namespace:
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="of a run, whose newest checkpoint is taken, or of one of its checkpoints")
    add("--prompt", metavar="TEXT", help="what the text begins with (default: nothing)")
    add("--length", type=int, default=300, metavar="N", help="tokens to add: bytes or letters (default: %(default)s)")
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="0: always the likeliest token; 1: as likely as the model has learned; above: wilder (default: "
        "%(default)g)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the random draws (default: %(default)s)")
    add("--device", default="cpu", metavar="{cpu,cuda}", help="where the model computes (default: %(default)s)")
    arguments = parser.parse_args()
    launch.check_range(arguments, length=(1, 1_000_000), temperature=(0, 100), seed=(0, 2**31 - 1))
    if arguments.prompt == "":
        raise launch.UsageError("--prompt '': give at least one character, or leave it out.")
    if arguments.device not in ("cpu", "cuda"):
        raise launch.UsageError(f"--device {arguments.device} is unknown; choose cpu or cuda.")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise launch.UsageError("--device cuda: torch sees no GPU here; leave it out.")
    return arguments


def main() -> None:
    arguments = parse()
    folder = newest(arguments.folder)
    try:
        model, notes = load(folder, arguments.device)
    except checkpoint.CheckpointError as error:
        raise launch.UsageError(str(error)) from error
    name = notes["text"]["name"]
    known = range(256) if arguments.prompt is None else notes["text"]["known"]
    prompt = encode(arguments.prompt or BEGIN, name, known)
    made = generate(model, prompt, arguments.length, arguments.temperature, arguments.seed)
    how = f"{arguments.length:,} tokens at temperature {arguments.temperature:g}, seed {arguments.seed}"
    print(f"{folder}: {how}", file=sys.stderr, flush=True)
    print(decode([*(prompt if arguments.prompt is not None else prompt[:0]).tolist(), *made.tolist()], name))


if __name__ == "__main__":
    launch.command(main)
