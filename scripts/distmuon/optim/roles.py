"""What each parameter of a model is: a map between hidden vectors, or a table, a head, a router, a vector.

Muon's step is steepest descent for a map between hidden vectors, so somebody has to know which parameters are maps.
The shape does not say: an [E, m, n] may hold experts or learned tokens, an [m, n] may be a table of positions. We ask
in this order, because each answer is more often wrong than the one before:

    structure      which module holds it, what reads that module's output, how wide it is
    the model      get_input_embeddings(), get_output_embeddings(), get_classifier()
    names          of modules and parameters, where nothing else is known

What no rule knows as a map is none: an [m, n] under AdamW costs little, a table under Muon is trained wrongly.
Nothing here knows of an optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from distmuon.sharding.matrices import Matrices

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)  # their weight_ih and weight_hh are maps, the gates below each other
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # say nothing about the order in which their modules run
MATRICES: dict[str, Matrices] = {"map": "whole", "stack": "stacked", "kernel": "flattened"}  # the roles for Muon
FEW_CHANNELS = 4  # of a picture, at most: a convolution with so few inputs reads data

# ---- Names, the weakest witnesses ---------------------------------------------------------------------------

MAP_LEAF = re.compile(
    r"w([qkvogiuxhr]|qkv|kv|in|out|up|down)?|weights?|kernel|proj(ection)?|linear|dense|fc|up|down|qkv"
)
FUSED = re.compile(r"w?qkv(_proj)?|c_attn|query_key_value|in_proj_weight")  # query, key and value in one weight
POSITIONS = {"pos", "position", "positions", "positional", "wpe", "type", "rel", "relative"}
TABLES = {"embed", "embedding", "embeddings"}
NO_MAP = {
    *("bias", "scale", "gain", "log", "norm", "g"),
    *("unembed", "table", "codebook", "codebooks", "centroids", "prototypes", "prompt", "prompts", "latents", "memory"),
    *TABLES,
    *POSITIONS,
}
ROUTERS = {"router", "gating", "param_groups"}
HEAD_ANYWHERE = ("head", "lm_head")
HEAD = re.compile(r"(\w+_)?(head|heads|classifier|classifiers|logits)|cls|unembed\w*|embed_out")
HEAD_ONCE = re.compile(r"fc|fc_out|proj_out|output|(\w+_)?outputs|scorer?|(\w+_)?decoder")  # hidden ones in many blocks
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_experts")


class Role(NamedTuple):
    """What a parameter is, and how we know."""

    kind: str  # "map", "stack", "kernel": Muon's; "table", "head", "router", "vector", "other": AdamW's
    reason: str


class Place(NamedTuple):
    """Where a parameter is held. path, leaf: the module's name, and the parameter's in it."""

    name: str
    path: str
    module: nn.Module
    leaf: str
    parameter: nn.Parameter


def roles_of(model: nn.Module, heads: Iterable[str] | None = None) -> Iterator[tuple[str, nn.Parameter, Role]]:
    """Yield (name, parameter, role) of every parameter once, under its first name.

    heads: last names of the modules that map to outputs, instead of those known here.
    """
    places = list(_places(model))
    structure = _Structure(model, [place for place in places if not is_lazy(place.parameter)])
    tables, heads_found = structure.tables(), structure.heads(heads)
    routers, seen = structure.routers(), set[int]()
    for place in places:
        if id(place.parameter) in seen:
            continue
        seen.add(id(place.parameter))
        role = _general(place) or _special(place, tables, heads_found, routers) or _by_shape(place)
        yield place.name, place.parameter, role


def _general(place: Place) -> Role | None:
    """Return the role of what is no matrix, whatever holds it."""
    p = place.parameter
    if is_lazy(p):
        return Role("other", "no shape yet: let the model run once before")
    if not p.is_floating_point():
        return Role("other", f"{p.dtype}: Newton–Schulz takes real numbers")
    if p.ndim < 2:
        return Role("vector", f"{p.ndim}-D: not a map between hidden vectors")
    if p.numel() == 0:
        return Role("other", "empty: there is nothing to orthogonalize")
    return None


def _special(place: Place, tables: Mapping[int, str], heads: Mapping[int, str], routers: set[int]) -> Role | None:
    """Return the role of a table, a head or a router."""
    key, words = id(place.parameter), _words(place.leaf)
    if key in tables:  # wherever it is held: a tied output layer may come first
        return Role("table", tables[key])
    if key in heads and words.isdisjoint({"bias", "g"}):
        return Role("head", heads[key])
    if key in routers and "bias" not in words:
        return Role("router", "router: its rows are separate choices between experts")
    return None


def _by_shape(place: Place) -> Role:
    """Return the role of a parameter of two dimensions or more that is no table, head or router."""
    p, module = place.parameter, place.module
    if p.ndim == 2 and 1 in p.shape:
        row = p.shape[0] == 1
        return Role("vector", "one row: a single number comes out" if row else "one column: a gain, or a single input")
    if _is_norm(module):
        return Role("vector", "a norm's gains: not a map between hidden vectors")
    if p.ndim == 2 and not _is_map(place):
        return Role("other", "2-D, but no layer multiplies by it")
    if p.ndim == 2:
        if any(FUSED.fullmatch(name.lower()) for name in (place.path.rpartition(".")[2], place.leaf)):
            return Role("map", "hidden matrix; if it is query, key and value in one, say so with the option `matrices`")
        return Role("map", "hidden matrix")
    if _is_kernel(place):
        return _kernel(place)
    if p.ndim == 3 and 1 not in p.shape and _is_stack(place):
        return Role("stack", f"{p.shape[0]} matrices, each a hidden one")
    return Role("other", f"{p.ndim}-D: not a map between hidden vectors")


def _kernel(place: Place) -> Role:
    if getattr(place.module, "groups", 1) > 1:
        return Role("other", "a grouped convolution's kernel: it is no single map between channels")
    if getattr(place.module, "in_channels", FEW_CHANNELS + 1) <= FEW_CHANNELS:
        return Role("other", "a convolution that reads data: it embeds pictures, as a table embeds tokens")
    if place.parameter[0].numel() == 1 or place.parameter.shape[0] == 1:
        return Role("vector", "a kernel with one row or column: a gain")
    return Role("kernel", "hidden convolution, flattened to [out, all else]")


# ---- Structure ----------------------------------------------------------------------------------------------


class WeightLayer(NamedTuple):
    """A module that multiplies by one weight. inputs, outputs: the widths of what it reads and gives."""

    path: str
    weight: nn.Parameter
    inputs: int
    outputs: int


class _Structure:
    """A model's modules: who holds which parameter, and which of them are layers."""

    def __init__(self, model: nn.Module, places: Sequence[Place]) -> None:
        self.model, self.places = model, places
        self.held: dict[int, list[Place]] = {}  # by the module
        self.layers: dict[int, WeightLayer] = {}  # by the module
        for place in self.places:
            self.held.setdefault(id(place.module), []).append(place)
            if _is_layer(place):
                self.layers[id(place.module)] = WeightLayer(place.path, place.parameter, *_widths(place))
        self.read = {layer.inputs for layer in self.layers.values()}  # the widths

    def tables(self) -> dict[int, str]:
        """Return the embeddings' parameters, with reasons."""
        found = {
            id(place.parameter): "embedding: a table of rows, looked up one by one"
            for place in self.places
            if _is_table(place)
        }
        for module in _said(self.model, "get_input_embeddings"):
            for p in module.parameters():
                if p.ndim > 1:
                    found.setdefault(id(p), "the model calls it its input embedding")
        return found

    def heads(self, names: Iterable[str] | None) -> dict[int, str]:
        """Return the weights of layers that map to the model's outputs, with the first reason that holds."""
        found = {id(layer.weight): "output head: the model's last layer" for layer in self._last(self.model, False)}
        for layer in self._as_wide_as_the_vocabulary():
            found.setdefault(id(layer.weight), "output head: as wide as the vocabulary")
        told = [
            (module, f"the model's {method}() is it")
            for method in ("get_output_embeddings", "get_classifier")
            for module in _said(self.model, method)
        ]
        for path, module in self.model.named_modules():
            if path and _is_called_head(path, names):
                told.append((module, "its rows are separate classes"))
        for module, reason in told:
            for layer in self._last(module, True):
                found.setdefault(id(layer.weight), f"output head: {reason}")
        return found

    def routers(self) -> set[int]:
        """Return what chooses between experts: layers beside experts, with a row for each; or so called."""
        found = set()
        for module in self.model.modules():
            if counts := _numbers_of_experts(module):
                near = [module, *_beside_experts(module)]
                near += [inner for child in near[1:] for inner in _beside_experts(child)]
                found |= {id(p.parameter) for m in near for p in self.held.get(id(m), ()) if _chooses(p, counts)}
        for place in self.places:
            words, shape = _words(type(place.module).__name__), place.parameter.shape
            few_rows = "gate" in words and len(shape) == 2 and shape[0] < shape[1]
            if few_rows or ROUTERS & {*words, *place.path.split(".")[-2:]}:
                found.add(id(place.parameter))
        return found

    def _last(self, module: nn.Module, is_part: bool) -> list[WeightLayer]:
        """Return the layers that give the module's output, as far as the order of its modules says.

        The last one, and those before it that read what it reads and that no layer reads: policy and value. A model
        that is a single layer is not taken for a head. is_part: whether other layers come before the module.
        """
        if id(module) in self.layers:
            return [self.layers[id(module)]] if is_part else []
        children = [child for child in module.children() if next(child.parameters(), None) is not None]
        if not children or isinstance(module, CONTAINERS):
            return [self.layers[id(child)] for child in children if id(child) in self.layers] if is_part else []
        last = children[-1]
        if id(last) not in self.layers:
            inside = len(children) == 1 or isinstance(last, nn.Sequential)
            return self._last(last, is_part or len(children) > 1) if inside else []
        if len(children) == 1 and not is_part:
            return []
        found = [self.layers[id(last)]]
        for child in children[-2::-1]:
            layer = self.layers.get(id(child))
            if layer is None or layer.inputs != found[0].inputs or layer.outputs in self.read:
                break
            found.append(layer)
        return found

    def _as_wide_as_the_vocabulary(self) -> Iterator[WeightLayer]:
        """Yield layers, in no repeated block, with as many outputs as a table has rows.

        Not where a layer reads that width: then it is a hidden one, too.
        """
        tables = [place for place in self.places if _is_table(place) and not _words(place.path) & POSITIONS]
        widths = {place.parameter.shape[0] for place in tables} - self.read
        yield from (a for a in self.layers.values() if a.outputs in widths and not _is_repeated(a.path))


def _places(model: nn.Module) -> Iterator[Place]:
    """Yield where parameters are held, shared ones more than once; what is parametrized belongs to its layer."""
    modules = dict(model.named_modules())
    for path, module in modules.items():
        owner, leaf = path, None
        if isinstance(module, ParametrizationList):
            owner, _, leaf = path.rsplit(".", 2) if path.count(".") > 1 else ("", "", path.rsplit(".", 1)[-1])
        for own, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{own}" if path else own
            yield Place(name, owner, modules[owner], leaf or own, parameter)


def _is_layer(place: Place) -> bool:
    """Say whether a module is a layer with this weight: a linear one, or a convolution."""
    is_weight = place.leaf in ("weight", "weight_v", "kernel")
    return is_weight and (_is_kernel(place) or (place.parameter.ndim == 2 and _is_map(place)))


def _is_table(place: Place) -> bool:
    if isinstance(place.module, EMBEDDINGS):
        return True
    words = _words(type(place.module).__name__)
    return bool(words & TABLES) and place.parameter.ndim == 2 and place.leaf == "weight"


def _is_map(place: Place) -> bool:
    """Say whether a layer multiplies by this [m, n]."""
    module, words = place.module, _words(place.leaf)
    if isinstance(module, (nn.Bilinear, *EMBEDDINGS)) or words & NO_MAP:
        return False
    if isinstance(module, (nn.Linear, *RECURRENT)) or _declared_widths(module):
        return place.leaf.startswith("weight")
    names = _words(type(module).__name__) | _words(place.path.rpartition(".")[2])
    return not names & (NO_MAP | ROUTERS) and any(MAP_LEAF.fullmatch(word) for word in words)


def _is_stack(place: Place) -> bool:
    """Say whether these are matrices beside each other, such as experts or heads."""
    words = _words(place.leaf)
    if isinstance(place.module, nn.Bilinear) or words & NO_MAP:
        return False
    names = {*_words(type(place.module).__name__), *_words(place.path), *words}
    experts = any(name.startswith(("expert", "moe")) for name in names) or bool(_numbers_of_experts(place.module))
    return experts or (not names & NO_MAP and any(MAP_LEAF.fullmatch(word) for word in words))


def _is_kernel(place: Place) -> bool:
    convolves = isinstance(place.module, _ConvNd) or hasattr(place.module, "kernel_size")
    return convolves and place.parameter.ndim in (3, 4, 5) and place.leaf.startswith("weight")


def _is_norm(module: nn.Module) -> bool:
    return "norm" in _words(type(module).__name__) and _declared_widths(module) is None


def _declared_widths(module: nn.Module) -> tuple[int, int] | None:
    """Return the inputs and outputs that a linear layer says it has, Hugging Face's Conv1D among them."""
    for names in (("in_features", "out_features"), ("nx", "nf")):
        widths = tuple(getattr(module, name, None) for name in names)
        if all(isinstance(width, int) for width in widths):
            return widths  # type: ignore[return-value]
    return None


def _widths(place: Place) -> tuple[int, int]:
    """Return how many inputs and outputs a layer has; a weight is [out, in] unless its module says otherwise."""
    if _is_kernel(place):
        given = tuple(getattr(place.module, name, None) for name in ("in_channels", "out_channels"))
        return given if None not in given else place.parameter.shape[1::-1]  # type: ignore[return-value]
    outputs, inputs = place.parameter.shape
    declared = _declared_widths(place.module)
    return declared if declared in ((inputs, outputs), (outputs, inputs)) else (inputs, outputs)


def _numbers_of_experts(module: nn.Module) -> set[int]:
    """Return how many experts a module says or seems to have; usually none."""
    counts = {getattr(module, name, None) for name in EXPERT_COUNTS}
    stacks = [p for leaf, p in module.named_parameters(recurse=False) if "expert" in leaf]
    for name, child in module.named_children():
        if "expert" in name and "shared" not in name:
            counts |= {len(inner) for inner in child.modules() if isinstance(inner, CONTAINERS)}
            stacks += child.parameters()
    counts |= {p.shape[0] for p in stacks if not is_lazy(p) and p.ndim == 3}
    return {count for count in counts if isinstance(count, int) and count > 1}


def _beside_experts(module: nn.Module) -> list[nn.Module]:
    return [child for name, child in module.named_children() if "expert" not in name]


def _chooses(place: Place, counts: set[int]) -> bool:
    """Say whether a weight has an output for each expert: a row, or a column of what no linear layer holds."""
    p = place.parameter
    return p.ndim == 2 and (p.shape[0] in counts or (p.shape[1] in counts and not isinstance(place.module, nn.Linear)))


# ---- What the model and its names say -----------------------------------------------------------------------


def _said(model: nn.Module, method: str) -> Iterator[nn.Module]:
    """Yield the modules that this method of the model, or of a module in it, returns."""
    for module in model.modules():
        if not callable(ask := getattr(module, method, None)):
            continue
        try:
            answer: Any = ask()
        except Exception:  # the method is the model's own, and many only say that they have none
            continue
        for found in answer if isinstance(answer, tuple | list) else [answer]:
            if isinstance(found, nn.Module) and found is not model:
                yield found


def _is_called_head(path: str, names: Iterable[str] | None) -> bool:
    """Say whether a module's name is that of a head. Some are only where no block is repeated around them."""
    last = path.rpartition(".")[2]
    if names is not None:
        return last in names
    if last in HEAD_ANYWHERE:
        return True
    return not _is_repeated(path) and bool(HEAD.fullmatch(last) or HEAD_ONCE.fullmatch(last))


def _is_repeated(path: str) -> bool:
    """Say whether a module is inside of a numbered one, as hidden layers are."""
    return any(part.isdigit() for part in path.split("."))


def _words(name: str) -> set[str]:
    """Return the words of an identifier, in lower case and without numbers: up and proj of up_proj, w of w1."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}
