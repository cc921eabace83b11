"""Published transformers as lists of parameters, so that layouts can be planned for real models and no process.

    column parallel   query, key, value, up, gate    cut along dimension 0
    row parallel      out, down                      cut along dimension 1
    vocabulary        embedding and head             cut along dimension 0, padded to a multiple of 128 T
    replicated        norms, positions, a router, Moonlight's joint compression of keys and values

The cuts are Megatron-LM's (Shoeybi et al. 2019, section 3; its vocabulary padding too). Query, key and value are
separate matrices, as everywhere in this book. Hidden matrices go to Muon, all else to AdamW, and the matrices come
first in the map, as `routing.split_parameters` has them. Pure Python: no torch.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from distmuon.launch import UsageError
from distmuon.sharding.layout import ParamSpec

MOST = 1_000_000  # in a field of one's own shape
VOCABULARY_MULTIPLE = 128  # times T: Megatron-LM's --make-vocab-size-divisible-by


class Weight(NamedTuple):
    """A whole parameter. cut: its tp_split_dim. muon: whether Muon moves it. used: by what share of all tokens."""

    name: str
    shape: tuple[int, ...]
    cut: int | None
    muon: bool
    used: float = 1.0


class Experts(NamedTuple):
    """A mixture of experts: `routed` of width `width`, of which each token takes `active`; one shared of `shared`."""

    routed: int
    active: int
    width: int
    shared: int
    dense_layers: int


class Latent(NamedTuple):
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values from `rank` numbers per token."""

    rank: int
    rotary: int


@dataclass(frozen=True)
class Shape:
    """A published model, from `source`. context: tokens of a sequence. mlp: width of its hidden layer.

    gated: three matrices per MLP in place of two. classic: GPT's biases, LayerNorms and learned positions. tied: the
    head is the embedding.
    """

    title: str
    source: str
    layers: int
    width: int
    heads: int
    key_heads: int
    mlp: int
    vocabulary: int
    context: int
    gated: bool = True
    classic: bool = False
    tied: bool = False
    experts: Experts | None = None
    latent: Latent | None = None

    def permits(self, tp: int) -> bool:
        """Say whether heads, and the heads of keys and values, can be shared out evenly over `tp` ranks."""
        return self.heads % tp == 0 and self.key_heads % tp == 0

    def weights(self) -> list[Weight]:
        """Return all parameters, whole, in the order of the model."""
        found = [Weight("tokens", (self.vocabulary, self.width), 0, False, float(self.tied))]
        if self.classic:
            found.append(Weight("positions", (self.context, self.width), None, False, 0.0))
        blocks: dict[bool, list[Weight]] = {}  # all with experts are alike, and so are all without
        for layer in range(self.layers):
            mixture = self.experts is not None and layer >= self.experts.dense_layers
            block = blocks.get(mixture) or blocks.setdefault(mixture, self._block(mixture))
            found += [Weight(f"blocks.{layer}.{w.name}", w.shape, w.cut, w.muon, w.used) for w in block]
        found += self._norm("norm")
        if not self.tied:
            found.append(Weight("head", (self.vocabulary, self.width), 0, False))
        return found

    def specs(self, tp: int, dtype: str = "bfloat16") -> tuple[list[ParamSpec], list[int]]:
        """Return TP-local parameters, Muon's first, and the indices of Muon's.

        Raises ValueError, naming the model, for a T that its heads do not permit.
        """
        if tp < 1 or not self.permits(tp):
            raise ValueError(
                f"{self.title} has {self.heads} heads, {self.key_heads} of keys: not to be cut over T={tp}."
            )
        return local_specs(self.weights(), tp, dtype)

    @cached_property
    def parameters(self) -> int:
        """All elements."""
        return sum(math.prod(weight.shape) for weight in self.weights())

    @cached_property
    def active(self) -> int:
        """Elements of matrices that one token is multiplied by; 6 of them cost a token that many FLOPs, both ways."""
        return round(sum(w.used * math.prod(w.shape) for w in self.weights() if len(w.shape) == 2))

    # ---- One block -----------------------------------------------------------------------------------------

    def _block(self, mixture: bool) -> list[Weight]:
        mlp = self._mixture() if mixture else self._mlp("", self.mlp)
        return [*self._norm("norm1"), *self._attention(), *self._norm("norm2"), *mlp]

    def _attention(self) -> list[Weight]:
        each = self.width // self.heads
        if self.latent is not None:
            rank, rotary = self.latent
            return [
                Weight("query", (self.heads * (each + rotary), self.width), 0, True),
                Weight("compress", (rank + rotary, self.width), None, True),
                Weight("norm3.weight", (rank,), None, False),
                Weight("expand", (self.heads * 2 * each, rank), 0, True),
                Weight("out", (self.width, self.heads * each), 1, True),
            ]
        rows = {"query": self.width, "key": self.key_heads * each, "value": self.key_heads * each}
        cut = [w for name, n in rows.items() for w in self._column(name, n, self.width)]
        return cut + self._row("out", self.width, self.width)

    def _mlp(self, prefix: str, hidden: int, used: float = 1.0) -> list[Weight]:
        names = ("gate", "up") if self.gated else ("up",)
        parts = [w for name in names for w in self._column(prefix + name, hidden, self.width)]
        return [w._replace(used=used) for w in parts + self._row(f"{prefix}down", self.width, hidden)]

    def _mixture(self) -> list[Weight]:
        assert self.experts is not None
        routed, share = self.experts.routed, self.experts.active / self.experts.routed
        found = [Weight("router", (routed, self.width), None, True)]
        for expert in range(routed):
            found += self._mlp(f"experts.{expert}.", self.experts.width, share)
        return found + self._mlp("shared.", self.experts.shared)

    def _column(self, name: str, rows: int, columns: int) -> list[Weight]:
        bias = [Weight(f"{name}.bias", (rows,), 0, False)] * self.classic
        return [Weight(name, (rows, columns), 0, True), *bias]

    def _row(self, name: str, rows: int, columns: int) -> list[Weight]:
        bias = [Weight(f"{name}.bias", (rows,), None, False)] * self.classic
        return [Weight(name, (rows, columns), 1, True), *bias]

    def _norm(self, name: str) -> list[Weight]:
        parts = ("weight", "bias") if self.classic else ("weight",)
        return [Weight(f"{name}.{part}", (self.width,), None, False) for part in parts]


def local_specs(weights: Iterable[Weight], tp: int, dtype: str = "bfloat16") -> tuple[list[ParamSpec], list[int]]:
    """Return these weights as TP-local parameters, Muon's first, and the indices of Muon's."""
    ordered = sorted(weights, key=lambda weight: not weight.muon)  # stable
    specs = [ParamSpec(w.name, _local(w, tp), dtype, w.cut) for w in ordered]
    return specs, [index for index, weight in enumerate(ordered) if weight.muon]


def _local(weight: Weight, tp: int) -> tuple[int, ...]:
    if weight.cut is None:
        return weight.shape
    unit = VOCABULARY_MULTIPLE * tp if weight.name in ("tokens", "head") else tp
    whole = (
        -(-weight.shape[weight.cut] // unit) * unit if weight.name in ("tokens", "head") else weight.shape[weight.cut]
    )
    if whole % tp:
        raise ValueError(f"{weight.name} has {whole} rows or columns to be cut, which T={tp} does not divide.")
    return tuple(whole // tp if dim == weight.cut else n for dim, n in enumerate(weight.shape))


MODELS: dict[str, Shape] = {
    "gpt2": Shape(
        "GPT-2", "openai/gpt-2, src/model.py, default_hparams; the smallest", layers=12, width=768, heads=12,
        key_heads=12, mlp=3072, vocabulary=50257, context=1024, gated=False, classic=True, tied=True,
    ),
    "llama3_8b": Shape(
        "Llama 3 8B", "meta-llama/llama-models, models/sku_list.py (14336 = 1.3 x 8/3 x 4096 up to 1024s)", layers=32,
        width=4096, heads=32, key_heads=8, mlp=14336, vocabulary=128256, context=8192,
    ),
    "moonlight": Shape(
        "Moonlight", "slime, scripts/models/moonlight.sh; 2.24B of 15.29B active as in Liu et al. 2025",
        layers=27, width=2048, heads=16, key_heads=16, mlp=11264, vocabulary=163840, context=8192,
        experts=Experts(routed=64, active=6, width=1408, shared=2816, dense_layers=1),
        latent=Latent(rank=512, rotary=64),
    ),
    "llama3_70b": Shape(
        "Llama 3 70B", "meta-llama/llama-models, models/sku_list.py (28672 = 1.3 x 8/3 x 8192 up to 4096s)", layers=80,
        width=8192, heads=64, key_heads=8, mlp=28672, vocabulary=128256, context=8192,
    ),
    "gpt3_175b": Shape(
        "GPT-3 175B", "Brown et al. 2020, Table 2.1; built as GPT-2", layers=96, width=12288, heads=96, key_heads=96,
        mlp=49152, vocabulary=50257, context=2048, gated=False, classic=True, tied=True,
    ),
    "llama2_7b": Shape(
        "Llama 2 7B", "meta-llama/llama-models, models/sku_list.py (11008 = 8/3 x 4096 up to 256s)", layers=32,
        width=4096, heads=32, key_heads=32, mlp=11008, vocabulary=32000, context=4096,
    ),
    "kimi_k2": Shape(
        "Kimi K2's sizes", "config.json (Moonshot AI 2025), with attention as in Moonlight",
        layers=61, width=7168, heads=64, key_heads=64, mlp=18432, vocabulary=163840, context=4096,
        experts=Experts(routed=384, active=8, width=2048, shared=2048, dense_layers=1),
        latent=Latent(rank=512, rotary=64),
    ),
}  # fmt: skip
SURVEYED = ("gpt2", "llama3_8b", "moonlight", "llama3_70b", "gpt3_175b")  # of them, what chapters 13 and 15 look at


# ---- One's own ------------------------------------------------------------------------------------------------


def find_shape(name: str) -> Shape:
    """Return the model of that name, or the one that a .toml file describes, by the names of Shape's fields.

    Its tables [experts] and [latent] have the fields of Experts and Latent. Raises UsageError, naming what is wrong.
    """
    if not name.endswith(".toml"):
        if name not in MODELS:
            raise UsageError(f"--model {name}: choose one of {', '.join(MODELS)}, or the path of a .toml file.")
        return MODELS[name]
    try:
        told = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--model {name}: cannot be read ({error.strerror}); name a file that is there.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--model {name}: is no TOML ({error}); mend it.") from error
    told = {"title": Path(name).stem, "source": name} | told
    parts = {field: kind for field, kind in (("experts", Experts), ("latent", Latent)) if field in told}
    found = _read(Shape, told | {field: _read(kind, told[field], name) for field, kind in parts.items()}, name)
    if found.experts and found.experts.active > found.experts.routed:
        raise UsageError(
            f"--model {name}: a token takes {found.experts.active} of {found.experts.routed} experts; mend it."
        )
    if found.width % found.heads:
        raise UsageError(f"--model {name}: {found.heads} heads do not divide a width of {found.width}; mend one.")
    return found


def _read(kind: Any, told: Any, name: str) -> Any:
    """Return an instance of a class from a TOML table with its fields."""
    hints = get_type_hints(kind)
    if not isinstance(told, dict):
        raise UsageError(f"--model {name}: [{kind.__name__.lower()}] is {told!r}; make it a table.")
    for field, value in told.items():
        if field not in hints:
            raise UsageError(f"--model {name}: there is no {field!r}; known are {', '.join(hints)}.")
        wanted = hints[field]
        if wanted in (int, bool, str) and type(value) is not wanted:
            raise UsageError(f"--model {name}: {field} is {value!r}; it wants {wanted.__name__}.")
        least = 0 if field == "dense_layers" else 1
        if wanted is int and not least <= value <= MOST:
            raise UsageError(f"--model {name}: {field} is {value:,}; it must be from {least} to {MOST:,}.")
    optional = {field.name for field in fields(kind) if field.default is not MISSING} if is_dataclass(kind) else set()
    if missing := [field for field in hints if field not in told and field not in optional]:
        raise UsageError(f"--model {name}: {', '.join(missing)} is missing; add it.")
    return kind(**told)
