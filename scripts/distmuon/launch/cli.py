"""The command line of every worker: shared arguments, help with examples, and every mistake answered in one sentence.

    parser = launch.parser(__doc__)                  # the first paragraph describes; its command lines are examples
    launch.add_arguments(parser, dp=4, tp=2)         # --dp --tp --backend --device --timeout --threads
    arguments = parser.parse_args()                  # arguments.given: the names of those on the command line
    job = launch.chosen_job(arguments, TAKES)        # an option that would do nothing is refused
    launch.check_range(arguments, steps=(1, 1000))
    launch.check_writable("--json", arguments.json)  # before anything is started, not after the training

`launch` passes all of it on, so that a worker imports one module.
"""

from __future__ import annotations

import argparse
import tempfile
import textwrap
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

BACKENDS = ("gloo", "nccl", "auto")
DEVICES = ("cpu", "cuda")
WORLD = ("dp", "tp", "backend", "device", "timeout", "threads")  # what `add_arguments` adds and `options` returns
DEFAULT_TIMEOUT = 60.0  # seconds; NCCL's own default of 10 minutes turns every mistake into a coffee break


class UsageError(ValueError):
    """A wrong argument. `launch.command` prints it as one sentence and exits with code 2; nothing was started."""


class OutputError(RuntimeError):
    """Results could not be written, after the work. `launch.command` prints one sentence and exits with code 1."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError, where argparse prints a page of usage and exits.

    What it returns has one attribute more, `given`: the names of the arguments that were on the command line.
    """

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        arguments = super().parse_args(args, namespace)
        defaults = {action: action.default for action in self._actions}
        for action in defaults:
            action.default = argparse.SUPPRESS
        try:
            named = {action.dest for action in defaults}  # and not what only `set_defaults` knows of
            arguments.given = frozenset(vars(super().parse_args(args))) & named
        finally:
            for action, default in defaults.items():
                action.default = default
        return arguments

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.rstrip('.')}; see --help.")


def parser(doc: str | None) -> Parser:
    """Return the parser of the worker whose module has this docstring.

    Its prose becomes the description; its lines that begin with `python` or `torchrun`, the examples of --help.
    """
    paragraphs, examples = [""], []
    for line in map(str.strip, (doc or "").strip().splitlines()):
        if line.startswith(("python ", "torchrun ")):
            examples.append(f"  {line}")
        elif line:
            paragraphs[-1] += f"{line} "
        elif paragraphs[-1]:
            paragraphs.append("")
    return Parser(
        description="\n\n".join(textwrap.fill(text, 78) for text in paragraphs if text),
        epilog="\n".join(["examples:", *examples]) if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --s for --steps would mean something else as soon as there is a --seed
    )


def choices(names: tuple[str, ...]) -> str:
    """Return the names as --help shows them; what is given is checked later, by whoever knows the remedy."""
    return "{" + ",".join(names) + "}"


def add_arguments(parser: argparse.ArgumentParser, dp: int, tp: int) -> None:
    """Add the arguments that every worker shares, with this worker's default grid."""
    group = parser.add_argument_group("the world: D x T ranks")
    add = group.add_argument
    add("--dp", type=int, default=dp, metavar="D", help="data-parallel ranks (default: %(default)s)")
    add("--tp", type=int, default=tp, metavar="T", help="tensor-parallel ranks (default: %(default)s)")
    carries = "gloo on CPUs, nccl on one GPU per rank, auto: nccl if there are enough GPUs (default: %(default)s)"
    add("--backend", default="gloo", metavar=choices(BACKENDS), help=f"what carries the collectives: {carries}")
    add("--device", metavar=choices(DEVICES), help="where tensors live (default: cuda with nccl, else cpu)")
    waits = "how long a collective may wait for a peer (default: %(default)g)"
    add("--timeout", type=float, default=DEFAULT_TIMEOUT, metavar="SECONDS", help=waits)
    add("--threads", type=int, default=1, metavar="N", help="CPU threads per rank (default: %(default)s)")


def options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments for `launch.run` that were parsed: those of `add_arguments`, or some of them."""
    return {name: getattr(arguments, name) for name in WORLD if name in arguments}


def chosen_job(arguments: argparse.Namespace, takes: Mapping[str, Collection[str]], job: str | None = None) -> str:
    """Return which of a worker's jobs is asked for; raise UsageError for an option given that does nothing in it.

    takes: job -> names of the arguments that it uses. A job is called by its option, "--follow"; "" is that of none.
    job: where options alone do not tell; else it is the first one whose option was given.
    """
    if job is None:
        job = next((name for name in takes if name and _name(name) in arguments.given), "")
    for name in sorted(arguments.given - {_name(job), *takes[job]}):
        others = [other for other in takes if name in takes[other]]
        remedy = f"it goes with {' or '.join(others)}" if others and "" not in others else "leave one of the two out"
        raise UsageError(f"{option_of(name)} does nothing {f'with {job}' if job else 'by itself'}; {remedy}.")
    return job


def check_range(arguments: argparse.Namespace, **ranges: tuple[float, float]) -> None:
    """Raise UsageError where an argument is not within its (least, most), NaN included; None is fine."""
    for name, (least, most) in ranges.items():
        value = getattr(arguments, name)
        if value is not None and not least <= value <= most:
            shown = f"{value:g}" if isinstance(value, float) else value
            raise UsageError(f"{option_of(name)} {shown}: must be from {least:,} to {most:,}.")


def check_known(arguments: argparse.Namespace, **known: Collection[str]) -> None:
    """Raise UsageError where an argument is none of the names that are known for it."""
    for name, names in known.items():
        if (value := getattr(arguments, name)) not in names:
            raise UsageError(f"{option_of(name)} {value}: choose one of {', '.join(names)}.")


def option_of(name: str) -> str:
    """Return the option by which an argument of this name is given on a command line."""
    return f"--{name.replace('_', '-')}"


def _name(option: str) -> str:
    """Return the name of the argument that the first word of `option` sets."""
    return option.partition(" ")[0].removeprefix("--").replace("-", "_")


def check_writable(option: str, path: str | None) -> None:
    """Raise UsageError if the file `path` cannot be written, its missing folders made. Leaves nothing; None is fine."""
    if path is None:
        return
    target = Path(path)
    try:
        if target.is_dir():
            raise UsageError(f"{option} {path}: that is a folder; name a file in it.")
        if target.exists():
            open(target, "ab").close()
            return
        nearest = next(folder for folder in target.absolute().parents if folder.exists())
        tempfile.TemporaryFile(dir=nearest).close()  # a permission bit does not tell: the root user, read-only disks
    except OSError as error:
        raise UsageError(
            f"{option} {path}: cannot be written ({error.strerror}); name a file in a folder that you may write to."
        ) from error
