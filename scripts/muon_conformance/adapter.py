"""What a Muon says of itself: how it is made, and which arithmetic, which conventions, which meshes it claims.

    adapter = Adapter(lambda groups, **options: MyMuon(groups, **options), scale="match_rms", nesterov=True)

Only what is claimed can fail. Of a class whose signature speaks torch.optim.Muon's language the adapter is read off the
signature; what neither says (None) is measured, and reported as measured.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from muon_conformance.reference import MUON, Quintic

Groups = list[dict[str, Any]]  # each with "params", a list of parameters, and options of its own
DEFAULTS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}  # what a check gives that asks for nothing else
SCALED_BY = {None: "original", "original": "original", "match_rms_adamw": "match_rms"}  # torch's adjust_lr_fn -> ours


@dataclass(frozen=True)
class Adapter:
    """How to make a Muon, and what it claims. None, wherever it may stand: nothing is claimed, the kit measures.

    make: (groups, **options) -> optimizer. groups: dictionaries with "params", a list of parameters, and options of
        the group's own; options: lr, weight_decay and momentum, for all groups. Both under the names in `option_names`.
    option_names: ours -> the optimizer's, for those that it calls differently: {"momentum": "mu"}.
    marks: what a group needs besides: {"muon": {"use_muon": True}, "adamw": {"use_muon": False}}. With "adamw" it
        claims to train what is no matrix by AdamW.
    nesterov: whether Newton–Schulz is fed G + mu M. momentum_kind: "sum", M <- mu M + G, or "average",
        M <- mu M + (1 - mu) G, of the state "momentum_buffer".
    coefficients, steps: of Newton–Schulz: one (a, b, c) for all steps, or a sequence of them, whose last is repeated.
    scale: the factor on the orthogonalized update: a name in `reference.SCALES`, or (A, B) -> factor.
    epsilon: the norm of Newton–Schulz's input below which the update may shrink; 0: none, at any scale of gradients.
    decays_bf16: whether decay takes from bf16 parameters, beside an update, what it takes from float32 ones.
    precision: the narrowest dtype that it rounds a matrix to on the way; sets all tolerances.
    flags: keywords that must not change the result: ({"foreach": True},).
    placements: names in `placements.PLACEMENTS` where it claims to train as it does on one process.
    on_ranks: (world, mesh, groups, **options) -> optimizer, called on every rank, if `make` does not do there. world:
        has rank, size and device. mesh: of the DTensors; None where parameters are plain.
    lacks: name of a check -> why this is not claimed: a sentence.
    refuses: name of a program -> words of the error with which it is refused.
    name, version: for the report. source: by which another process finds the adapter; `load` sets it.
    """

    make: Callable[..., Optimizer]
    option_names: Mapping[str, str] = field(default_factory=dict)
    marks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    nesterov: bool | None = None
    momentum_kind: str | None = None
    coefficients: Quintic | Sequence[Quintic] = MUON
    steps: int = 5
    scale: str | Callable[[int, int], float] | None = None
    epsilon: float | None = None
    decays_bf16: bool | None = None
    precision: torch.dtype = torch.bfloat16
    flags: Sequence[Mapping[str, Any]] = ()
    placements: Sequence[str] = ()
    on_ranks: Callable[..., Optimizer] | None = None
    lacks: Mapping[str, str] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    version: str = ""
    source: str = ""

    def optimizer(self, params: Any, **options: Any) -> Optimizer:
        """Return the optimizer over parameters, or over groups in our words; options: those that a check needs."""
        return self.make(self._theirs(params), **self._called(DEFAULTS | options))

    def optimizer_on(self, world: Any, mesh: Any, params: Any) -> Optimizer:
        """Return the optimizer on one rank of a world."""
        make = self.make if self.on_ranks is None else functools.partial(self.on_ranks, world, mesh)
        return make(self._theirs(params), **self._called(DEFAULTS))

    def _called(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {self.option_names.get(name, name): value for name, value in options.items()}

    def _theirs(self, params: Any) -> Groups:
        params = list(params)
        groups = params if params and isinstance(params[0], dict) else [{"params": params}]
        return [
            self._called({name: value for name, value in group.items() if name != "kind"})
            | dict(self.marks.get(group.get("kind", "muon"), {}))
            for group in groups
        ]


# ---- Finding one ------------------------------------------------------------------------------------------


def load(source: str) -> Adapter:
    """Return the adapter that a command's "package.module:Name" or "file.py:name" names: an Adapter or an optimizer.

    Raises ValueError, in one sentence with the remedy, where there is none.
    """
    where, colon, name = source.rpartition(":")
    if not colon or not name.isidentifier():
        raise ValueError(f"--optimizer is {source!r}; give package.module:Class, or file.py:adapter.")
    if where.endswith(".py"):
        where = str(Path(where).resolve())
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:
        raise ValueError(
            f"--optimizer {source}: {where} cannot be imported ({type(error).__name__}: {error})."
        ) from error
    if not hasattr(module, name):
        raise ValueError(f"--optimizer {source}: {where} has no {name}.")
    adapter = getattr(module, name)
    if isinstance(adapter, type) and issubclass(adapter, Optimizer):
        adapter = detect(adapter)
    if not isinstance(adapter, Adapter):
        raise ValueError(
            f"--optimizer {source} is a {type(adapter).__name__}; give an optimizer's class, or an Adapter."
        )
    settings = vars(adapter) | {"name": adapter.name or name, "source": f"{where}:{name}"}
    return Adapter(**settings | {"version": adapter.version or _version(where)})


def _from_file(path: Path) -> Any:
    """Import a file that belongs to no package, once in a process."""
    name = f"adapter_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _version(module: str) -> str:
    package = module.partition(".")[0]
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""


def detect(kind: type[Optimizer]) -> Adapter:
    """Return what a class that takes torch.optim.Muon's arguments claims by their defaults.

    Raises ValueError where it cannot be made from parameters, lr, weight_decay and momentum.
    """
    _, _, *own = inspect.signature(kind.__init__).parameters.values()  # besides self and the parameters
    given = {p.name: p.default for p in own if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    required = [name for name, default in given.items() if default is inspect.Parameter.empty and name != "lr"]
    if required or not given.keys() >= DEFAULTS.keys():
        wants = f"wants {', '.join(required)}" if required else "takes no lr, weight_decay and momentum"
        raise ValueError(
            f"{kind.__name__} {wants}; write an Adapter, which says how it is made: --optimizer file.py:name."
        )
    return Adapter(
        kind,
        nesterov=given.get("nesterov"),
        coefficients=given.get("ns_coefficients", MUON),
        steps=given.get("ns_steps", 5),
        scale=SCALED_BY.get(given["adjust_lr_fn"]) if "adjust_lr_fn" in given else None,
        epsilon=given.get("eps"),
        flags=[{flag: True} for flag in ("foreach", "fused") if flag in given],
        name=kind.__name__,
    )
