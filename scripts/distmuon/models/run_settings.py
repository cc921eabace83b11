"""What a run of `train.py` is told besides its grid, by the command line or a file, checked before anything starts."""

from __future__ import annotations

import argparse
import math
import os
import sys
import tomllib
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from distmuon import launch
from distmuon.launch.cli import option_of
from distmuon.models.corpus import corpus
from distmuon.models.learning_rate import SCHEDULES, share_at
from distmuon.optim import strategies

LEAST = 0.01  # of the peak: after the warm-up the learning rate is never lower


def option(default: Any, words: str, choices: tuple[str, ...] = ()) -> Any:
    """Return a setting that is an option of the command line. words: what --help says. choices: its values, if few."""
    return field(default=default, metadata={"words": words, "choices": choices})


@dataclass(frozen=True)
class RunSettings:
    """A run, besides its grid. batch: sequences of `context` tokens per step, of all ranks together."""

    text: str = option("alice", "alice (a book that comes along), language (whose entropy is known), or a file")
    width: int = option(64, "numbers in each of the model's hidden vectors")
    layers: int = option(2, "of the model, six matrices each")
    heads: int = option(4, "of attention; a multiple of --tp")
    context: int = option(64, "tokens that the model sees; a token is a byte, or a letter of language")
    optimizer: str = option(
        "muon", "muon: AdamW for what is no hidden matrix; adamw: for everything", ("muon", "adamw")
    )
    sharding: str = option(
        "fsdp2", "fsdp2: of PyTorch, with MuonW; zero1: this project's, with DistributedMuon", ("fsdp2", "zero1")
    )
    strategy: str = option("owner", "with --sharding zero1: how Muon sees whole matrices", strategies.names())
    dtype: str = option("float32", "of the arithmetic; weights are updated in float32", ("float32", "bfloat16"))
    lr: float = option(0.01, "highest learning rate, for Muon and AdamW alike")
    weight_decay: float = option(0.1, "for both, times the learning rate")
    schedule: str = option("cosine", "of the learning rate, after the warm-up", SCHEDULES)
    warmup: int = option(10, "steps in which the learning rate rises")
    steps: int = option(200, "at which the run is finished")
    batch: int = option(32, "sequences per step, of all ranks together")
    accumulate: int = option(1, "micro-batches of a rank per step")
    clip: float = option(1.0, "the gradients' global norm to this; inf: never")
    seed: int = option(0, "of weights and batches")
    folder: str | None = option(None, "for checkpoints and metrics, from which the same command goes on")
    save_every: int = option(50, "steps between checkpoints")
    keep: int = option(3, "so many checkpoints, the newest")
    evaluate_every: int = option(50, "steps between looks at the held-out text")
    log_every: int = option(10, "steps between lines, and between observations in metrics.jsonl")
    tensorboard: bool = option(False, "write for TensorBoard too, if it is installed")

    def shape(self, vocabulary: int) -> tuple[int, int, int, int, int]:
        """Return what a `Transformer` takes. vocabulary: tokens there are."""
        return vocabulary, self.width, self.layers, self.heads, self.context

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks together."""
        return self.batch * self.context

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, 1 to `steps`: up in the warm-up, then down along the schedule."""
        return self.lr * share_at(step, self.steps, self.warmup, self.schedule, LEAST)


def parse(doc: str | None, words: list[str] | None = None) -> tuple[argparse.Namespace, RunSettings]:
    """Return what the command line says, and below it the file that it names with --config; and the settings in it.

    doc: of the program. words: of the command line; None: this process's. Raises UsageError for what cannot be.
    """
    parser = launch.parser(doc)
    launch.add_arguments(parser, dp=1, tp=1)
    words_of_config = "options in TOML, by their names here: lr = 0.01; of several files, the later one counts"
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help=words_of_config)
    group = parser.add_argument_group("the run")
    for setting in fields(RunSettings):
        add_option(group, setting)
    words = sys.argv[1:] if words is None else words
    arguments = parser.parse_args(words)
    if arguments.config:
        arguments = parser.parse_args([word for path in arguments.config for word in words_of(path)] + words)
    return arguments, checked(arguments)


def add_option(group: Any, setting: Field[Any]) -> None:
    """Add the option of one setting."""
    name, default, words = option_of(setting.name), setting.default, setting.metadata["words"]
    if isinstance(default, bool):
        group.add_argument(name, action=argparse.BooleanOptionalAction, default=default, help=words)
        return
    kind = str if default is None else type(default)
    known = setting.metadata["choices"]
    metavar = launch.choices(known) if known else {int: "N", float: "X", str: "NAME"}[kind]
    shown = "" if default is None else f" (default: {default})"
    group.add_argument(name, type=kind, default=default, metavar=metavar, help=words + shown)


def words_of(path: str) -> list[str]:
    """Return a file of options as words of a command line. Raises UsageError, naming it, where it is none."""
    try:
        options = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise launch.UsageError(f"--config {path}: cannot be read ({error.strerror}); name a TOML file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise launch.UsageError(f"--config {path}: is no TOML ({error}); write lines such as lr = 0.01.") from error
    return [_word_of(path, name.replace("-", "_"), value) for name, value in options.items()]


def _word_of(path: str, name: str, value: Any) -> str:
    """Return one option of a file as it stands on a command line."""
    usual = {setting.name: setting.default for setting in fields(RunSettings)} | dict.fromkeys(launch.WORLD)
    if name not in usual:
        raise launch.UsageError(f"--config {path}: {name} is no option that a file may give; see --help.")
    if isinstance(value, dict | list):
        raise launch.UsageError(f"--config {path}: {name} is a {type(value).__name__}; give one value.")
    if not isinstance(value, bool):
        return f"{option_of(name)}={value}"
    if not isinstance(usual[name], bool):
        raise launch.UsageError(f"--config {path}: {name} is {str(value).lower()}; give it a value, or leave it out.")
    return option_of(name if value else f"no_{name}")


def check_folder(path: str) -> None:
    """Raise UsageError unless a run may look for checkpoints in this folder, and write there. It need not exist."""
    if not path:  # a variable of the shell that is not set: it would be the folder that we stand in
        raise launch.UsageError("--folder '': an empty path; name a folder, or leave it out.")
    try:
        if os.path.lexists(path):
            os.listdir(path)  # or it would look empty, and the run would begin anew
    except OSError as error:
        raise launch.UsageError(f"--folder {path}: cannot be read ({error.strerror}); name another folder.") from error
    launch.check_writable("--folder", str(Path(path) / "metrics.jsonl"))


def checked(arguments: argparse.Namespace) -> RunSettings:
    """Return the settings; raise UsageError, naming the value and the remedy, for what cannot be."""
    for setting in fields(RunSettings):
        value, known = getattr(arguments, setting.name), setting.metadata["choices"]
        if known and value not in known:
            raise launch.UsageError(f"--{setting.name} {value} is unknown; choose one of {', '.join(known)}.")
    launch.check_range(
        arguments,
        width=(4, 65_536), layers=(1, 1000), heads=(1, 1024), context=(2, 65_536), lr=(1e-9, 100), weight_decay=(0, 10),
        warmup=(0, 10**9), steps=(1, 10**9), batch=(1, 10**6), accumulate=(1, 10**6), clip=(0, math.inf),
        seed=(0, 2**31 - 1), save_every=(1, 10**9), keep=(1, 10**6), evaluate_every=(1, 10**9), log_every=(1, 10**9),
    )  # fmt: skip
    for option in ("save_every", "keep", "tensorboard"):
        if option in arguments.given and arguments.folder is None:
            raise launch.UsageError(f"{option_of(option)} does nothing without --folder FOLDER.")
    if "strategy" in arguments.given and (arguments.sharding, arguments.optimizer) != ("zero1", "muon"):
        raise launch.UsageError("--strategy goes with --sharding zero1 and --optimizer muon; leave it out.")
    if launch.under_torchrun() and "dp" not in arguments.given and arguments.tp > 0:
        arguments.dp = max(1, int(os.environ["WORLD_SIZE"]) // arguments.tp)  # as many as there are
    if arguments.width % arguments.heads:
        raise launch.UsageError(f"--width {arguments.width}: --heads {arguments.heads} does not divide it.")
    if arguments.tp > 0 and arguments.heads % arguments.tp:
        raise launch.UsageError(f"--heads {arguments.heads}: --tp {arguments.tp} does not divide them.")
    if arguments.dp > 0 and arguments.batch % (arguments.dp * arguments.accumulate):
        parts = arguments.dp * arguments.accumulate
        raise launch.UsageError(
            f"--batch {arguments.batch} cannot be shared out to --dp {arguments.dp} times --accumulate "
            f"{arguments.accumulate}; choose a multiple of {parts}."
        )
    arguments.text = os.path.expanduser(arguments.text)  # no shell has done it in a file, nor behind a "="
    if arguments.folder is not None:
        arguments.folder = os.path.expanduser(arguments.folder)
        check_folder(arguments.folder)
    if (room := len(corpus(arguments.text).held_out)) <= arguments.context:
        raise launch.UsageError(
            f"--context {arguments.context}: {room:,} tokens of this text are held out; choose fewer."
        )
    return RunSettings(**{setting.name: getattr(arguments, setting.name) for setting in fields(RunSettings)})
