"""Other people's Muons as the conformance kit sees them: how each is made, and what its documentation claims.

Nothing here is imported before it is asked for. Options are the defaults of each, but for those that make another
algorithm of Muon: row-wise normalization (NorMuon), decay of some elements only (cautious), other polynomials.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from distmuon.launch import World
from muon_conformance import arithmetic, conventions, kit
from muon_conformance.adapter import Adapter, Groups
from muonbook import peers

ROOMS = (arithmetic, conventions)  # each adds its own to the kit's checks
HERE = "muonbook.ch17.kit.peer_muons"
USE_MUON = {"muon": {"use_muon": True}, "adamw": {"use_muon": False}}
JORDAN: dict[str, Any] = dict(nesterov=True, momentum_kind="average", scale="original", epsilon=1e-7)
FIVE = (  # You Jiacheng's, a quintic for each step
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)  # fmt: skip
UNCYCLED = {
    f"program: the schedule is {schedule}": "its momentum has another name than schedulers know."
    for schedule in ("OneCycleLR", "CyclicLR")
}


class ExaminedMuon(NamedTuple):
    """source: for the kit. package: whose version is stored. clone: in `peers.PEERS`, where it is no package."""

    source: str
    package: str = ""
    clone: str = ""


EXAMINED = {
    "ours: Muon": ExaminedMuon("muon_conformance.ours:muon"),
    "ours: MuonW": ExaminedMuon("muon_conformance.ours:muonw"),
    "ours: DistributedMuon": ExaminedMuon("muon_conformance.ours:distributed_muon"),
    "torch.optim.Muon": ExaminedMuon("torch.optim:Muon", "torch"),
    "KellerJordan/Muon": ExaminedMuon(f"{HERE}:keller_jordan", clone="keller_jordan"),
    "muon-optimizer": ExaminedMuon(f"{HERE}:muon_optimizer", "muon-optimizer"),
    "muon-fsdp2": ExaminedMuon(f"{HERE}:muon_fsdp2", "muon-fsdp2"),
    "dion: Muon": ExaminedMuon(f"{HERE}:dion", clone="dion"),
    "timm": ExaminedMuon(f"{HERE}:timm", "timm"),
    "pytorch-optimizer": ExaminedMuon(f"{HERE}:pytorch_optimizer", "pytorch-optimizer"),
    "muonium": ExaminedMuon(f"{HERE}:muonium", "muonium"),
    "dtensor-muon": ExaminedMuon(f"{HERE}:dtensor_muon", "dtensor-muon"),
    "optimuon": ExaminedMuon(f"{HERE}:optimuon", "optimuon"),
    "adv-optm": ExaminedMuon(f"{HERE}:adv_optm", "adv-optm"),
}


def _clone(name: str) -> None:
    """Let a clone, if there is one in PEERS, be imported before what is installed."""
    folder = Path(os.environ.get("PEERS", "/nowhere"), peers.PEERS[name].repository.partition("/")[2])
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _complete(groups: Groups, **options: Any) -> Groups:
    """Give every group the options that others take as keywords; AdamW's have no momentum."""
    return [
        {name: value for name, value in options.items() if name != "momentum" or group["use_muon"]} | group
        for group in groups
    ]


def _of_groups(module: str, name: str = "Muon", clone: str = "") -> Callable[..., Any]:
    """Return how to make a Muon of this name that wants all options in its groups."""

    def make(groups: Groups, **options: Any) -> Any:
        if clone:
            _clone(clone)
        return getattr(importlib.import_module(module), name)(_complete(groups, **options))

    return make


def _of_options(module: str, name: str = "Muon", **settings: Any) -> Callable[..., Any]:
    """Return how to make a Muon of this name that takes options as keywords, and these settings besides."""

    def make(groups: Groups, **options: Any) -> Any:
        return getattr(importlib.import_module(module), name)(groups, **settings | options)

    return make


def _on_ranks(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return how to make on a rank what is made there as in one process."""
    return lambda world, mesh, groups, **options: make(groups, **options)


# ---- Jordan's, and what has grown from it -----------------------------------------------------------------

ON_NCCL: dict[str, Any] = JORDAN | {"marks": USE_MUON}  # they gather matrices of several shapes at once: not on gloo


def _jordans(clone: str = "") -> Adapter:
    one, ranks = (_of_groups("muon", name, clone) for name in ("SingleDeviceMuonWithAuxAdam", "MuonWithAuxAdam"))
    return Adapter(one, on_ranks=_on_ranks(ranks), **ON_NCCL)


keller_jordan, muon_optimizer = _jordans("keller_jordan"), _jordans()
muon_fsdp2 = Adapter(
    _of_groups("muon_fsdp2"),
    placements=("fsdp", "resumed"),
    lacks={
        name: "it is for FSDP2; on one device it calls a function that it does not have."
        for name, one in kit.CHECKS.items()
        if one.ranks == 1
    },
    **JORDAN | {"marks": USE_MUON, "scale": "match_rms"},
)

# ---- dion -------------------------------------------------------------------------------------------------


def _dions(groups: Groups, mesh: Any = None, **options: Any) -> Any:
    _clone("dion")
    settings: dict[str, Any] = {"nesterov": True, "adjust_lr": "rms_norm", "use_polar_express": False}
    return importlib.import_module("dion.muon").Muon(groups, mesh, **options | settings)


def _dions_on_ranks(world: World, mesh: Any, groups: Groups, **options: Any) -> Any:
    import torch.distributed as dist

    whole: Any = dist.group.WORLD if mesh is None else mesh
    if getattr(whole, "ndim", 1) > 1:  # the dimension along which it shares the work out
        whole = whole["shard" if "shard" in (whole.mesh_dim_names or ()) else "dp"]
    return _dions(groups, whole, **options)


dion = Adapter(
    _dions,
    option_names={"momentum": "mu"},
    marks={"adamw": {"algorithm": "adamw"}},
    nesterov=True,
    coefficients=FIVE,
    scale="match_rms",
    lacks={
        "AdamW for the rest": "its AdamW has options of other names.",
        **UNCYCLED,
    },
    on_ranks=_dions_on_ranks,
    placements=("replicated", "fsdp", "fsdp_uneven", "fsdp_short", "hybrid", "resumed"),
)

# ---- Libraries --------------------------------------------------------------------------------------------


def _timms(groups: Groups, **options: Any) -> Any:
    if "timm" not in sys.modules and importlib.util.find_spec("torchvision") is None:
        spec = importlib.util.find_spec("timm")  # its models want torchvision, its optimizers do not
        assert spec is not None
        folder = (spec.submodule_search_locations or [""])[0]
        for name, where in (("timm", folder), ("timm.optim", str(Path(folder, "optim")))):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [where]
    return importlib.import_module("timm.optim.muon").Muon(groups, **options)


def _optimuons(groups: Groups, **options: Any) -> Any:
    plain: dict[str, Any] = {"normuon": False, "cautious_wd": False, "gram_ns": False, "ns_norm_scale": 1.0}
    coefficients = importlib.import_module("optimuon").NS_COEFFICIENTS_DEFAULT
    return importlib.import_module("optimuon").Muon(groups, ns_coefficients=coefficients, **plain | options)


timm = Adapter(
    _timms,
    marks={"adamw": {"use_fallback": True}},
    nesterov=False,
    momentum_kind="average",
    coefficients=FIVE,
    scale="match_rms",
    epsilon=1e-7,
)
pytorch_optimizer = Adapter(
    _of_groups("pytorch_optimizer"),
    on_ranks=_on_ranks(_of_groups("pytorch_optimizer", "DistributedMuon")),
    flags=({"foreach": True},),
    **ON_NCCL,
)
_DTENSORS: dict[str, Any] = dict(
    option_names={"weight_decay": "wd"},
    marks={"adamw": {"algorithm": "adamw"}},
    nesterov=True,
    scale="original",
    placements=("replicated", "fsdp", "fsdp_uneven", "fsdp_short", "resumed", "columns", "hybrid", "tp"),
)
_PLAIN: dict[str, Any] = {"use_cautious_wd": False, "orthogonalization_strategy": "newton_schulz"}
muonium = Adapter(_of_options("muonium", **_PLAIN), **_DTENSORS)  # dtensor-muon's successor
dtensor_muon = Adapter(_of_options("dtensor_muon", fused_adam=False, **_PLAIN), **_DTENSORS)
optimuon = Adapter(_optimuons, nesterov=True, momentum_kind="average", scale="original", flags=({"foreach": False},))
adv_optm = Adapter(
    _of_options("adv_optm", "Muon_adv"),
    option_names={"momentum": "beta1"},
    marks=USE_MUON,
    nesterov=True,
    epsilon=1e-7,
    lacks={
        **UNCYCLED,
        "singular values": "it divides the update by its own norm, so that singular values depend on one another.",
        "AdamW for the rest": "its AdamW has options of other names.",
    },
)
