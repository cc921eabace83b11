"""Models that are odd in every way that torch allows: saved so that they can be loaded, or refused at once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from helpers_math import message, quick
from hypothesis import given
from hypothesis import strategies as st
from optimizer_cases import synthetic
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from distmuon.checkpoint import CheckpointError, load, save, to_torch, weights
from distmuon.extras.checkpoint.manifest import DTYPES
from distmuon.optim.muonw import MuonW
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.grid import Grid

SHAPES = [(), (0,), (1,), (3,), (0, 3), (3, 0), (1, 4), (4, 1), (1, 1), (2, 3), (2, 0, 3), (2, 1, 3)]
FLOATS = [torch.float32, torch.bfloat16, torch.float64]


def made(parts: list[tuple[str, Any]], seed: str) -> nn.Module:
    """Return a model that these words describe; two of the same words are alike in all but their numbers."""
    model = nn.Module()
    for number, (kind, about) in enumerate(parts):
        MAKE[kind](model, f"{kind.replace(' ', '_')}{number}", about, f"{seed} {number}")
    return model


def a_parameter(model: nn.Module, name: str, about: Any, seed: str) -> None:
    shape, dtype = about
    model.register_parameter(name, nn.Parameter(synthetic(seed, shape, dtype)))


def transposed(model: nn.Module, name: str, about: Any, seed: str) -> None:
    shape, dtype = about
    model.register_parameter(
        name, nn.Parameter(synthetic(seed, shape[::-1], dtype).permute(tuple(range(len(shape)))[::-1]))
    )


def every_other(model: nn.Module, name: str, about: Any, seed: str) -> None:
    shape, dtype = about
    model.register_parameter(name, nn.Parameter(synthetic(seed, (*shape, 2), dtype)[..., 0]))


def a_buffer(model: nn.Module, name: str, about: Any, seed: str) -> None:
    shape, dtype = about
    model.register_buffer(name, synthetic(seed, shape, torch.float64).mul(10).to(dtype))


def tied(model: nn.Module, name: str, about: Any, seed: str) -> None:
    shape, dtype = about
    part = nn.Module()
    part.one = part.two = nn.Parameter(synthetic(seed, shape, dtype))
    model.add_module(name, part)


def shared(model: nn.Module, name: str, about: Any, seed: str) -> None:
    layer = nn.BatchNorm1d(2)
    with torch.no_grad():
        for tensor in layer.state_dict().values():
            tensor.copy_(synthetic(seed, tensor.shape, torch.float64).mul(10).to(tensor.dtype))
    model.add_module(name, nn.Sequential(layer, layer))


def absent(model: nn.Module, name: str, about: Any, seed: str) -> None:
    model.register_buffer(name, None)
    model.register_parameter(f"{name}_too", None)
    model.register_buffer(f"{name}_not_kept", torch.zeros(2), persistent=False)


MAKE: dict[str, Callable[[nn.Module, str, Any, str], None]] = {
    "parameter": a_parameter,
    "transposed": transposed,
    "every other": every_other,
    "buffer": a_buffer,
    "tied": tied,
    "shared": shared,
    "absent": absent,
}
OF_PARAMETERS = st.tuples(
    st.sampled_from(["parameter", "transposed", "every other", "tied", "shared", "absent"]),
    st.tuples(st.sampled_from(SHAPES), st.sampled_from(FLOATS)),
)
OF_BUFFERS = st.tuples(st.just("buffer"), st.tuples(st.sampled_from(SHAPES), st.sampled_from(list(DTYPES.values()))))


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer | None:
    named = [(name, p) for name, p in model.named_parameters()]
    if kind == "none" or not named:
        return None
    muon = [pair for pair in named if pair[1].ndim == 2 and pair[1].numel()]
    rest = [pair for pair in named if not any(pair[1] is q for _, q in muon)]
    groups = [{"params": p, "algorithm": a} for p, a in ((muon, "muon"), (rest, "adamw")) if p]
    if kind == "MuonW":
        return MuonW(groups)
    if kind == "Zero1AdamW":
        return Zero1AdamW(named, Grid.alone())
    return torch.optim.AdamW(named)


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None, step: int) -> None:
    for number, p in enumerate(model.parameters()):
        p.grad = synthetic(f"{number} {step}", p.shape, p.dtype) if number != 1 else None
    if optimizer is not None:
        optimizer.step()


def bits(tensor: Tensor) -> Any:
    plain = tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensor.dtype, tensor.shape, plain.reshape(-1).view(torch.uint8).tolist()


def states(optimizer: torch.optim.Optimizer | None) -> list[Any]:
    """Return what is kept, of parameters with elements: a sharded optimizer keeps nothing of others."""
    found = [] if optimizer is None else optimizer.state.items()
    return [sorted((key, bits(value)) for key, value in state.items()) for p, state in found if p.numel()]


@quick(60)
@given(
    st.lists(OF_PARAMETERS | OF_BUFFERS, max_size=5), st.sampled_from(["MuonW", "Zero1AdamW", "torch's AdamW", "none"])
)
def test_what_is_saved_can_be_loaded_whatever_the_model(parts: list[tuple[str, Any]], kind: str) -> None:
    model, other = made(parts, "one"), made(parts, "two")
    optimizer, another = optimizer_of(model, kind), optimizer_of(other, kind)
    train(model, optimizer, 1)
    with tempfile.TemporaryDirectory() as folder:
        save(f"{folder}/saved", model, optimizer)
        load(f"{folder}/saved", other, another)
        out = weights(f"{folder}/saved")
    expected = {name: bits(value) for name, value in model.state_dict().items()}
    assert {name: bits(value) for name, value in other.state_dict().items()} == expected
    assert {name: bits(value) for name, value in out.items()} == expected
    assert states(another) == states(optimizer)
    train(model, optimizer, 2)
    train(other, another, 2)
    assert {n: bits(v) for n, v in other.state_dict().items()} == {n: bits(v) for n, v in model.state_dict().items()}


# ---- What cannot come back --------------------------------------------------------------------------------


class KeepsMore(nn.Linear):
    more: Any = None

    def get_extra_state(self) -> Any:
        return self.more

    def set_extra_state(self, state: Any) -> None:
        self.more = state


def keeps(more: Any) -> nn.Module:
    layer = KeepsMore(2, 2)
    layer.more = more
    return layer


def with_buffer(buffer: Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("odd", buffer)
    return model


def with_hook(hook: Callable[[dict[str, Tensor]], Any]) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(lambda module, state, prefix, metadata: hook(state))
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "extra state": (lambda: keeps({"a": 1}), "keeps '_extra_state', a dict, by get_extra_state"),
    "extra state that is a tensor": (lambda: keeps(torch.zeros(2)), "keeps '_extra_state', a Tensor, by get_extra"),
    "a copy": (lambda: with_hook(lambda s: s.update(weight=s["weight"].clone())), "state_dict makes 'weight' anew"),
    "a parameter left out": (
        lambda: with_hook(lambda s: s.__delitem__("weight")),
        "leaves 'weight' out, which is trained",
    ),
    "an expanded buffer": (lambda: with_buffer(torch.zeros(1).expand(3)), "'odd' is expanded"),
    "a sparse buffer": (lambda: with_buffer(torch.zeros(2, 2).to_sparse()), "'odd' is no dense tensor"),
    "no storage": (lambda: with_buffer(torch.zeros(2, device="meta")), "'odd' is on the meta device"),
    "no shape": (lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d()), "without a shape yet"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_could_not_be_loaded_is_refused_at_the_first_save(tmp_path: Path, kind: str) -> None:
    make, words = REFUSED[kind]
    model = make()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if not nn.parameter.is_lazy(p)])
    with pytest.raises(CheckpointError, match=words) as error:
        save(tmp_path / "saved", model, optimizer)
    message(error)
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_is_no_tensor_is_refused_at_the_first_save(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.step(lambda: model(torch.ones(2)).sum())
    with pytest.raises(
        CheckpointError, match=r"of the optimizer' is a int and no tensor|is a list and no tensor"
    ) as error:
        save(tmp_path / "saved", model, optimizer)
    message(error)


def test_two_tensors_do_not_become_one(tmp_path: Path) -> None:
    two: list[tuple[str, Any]] = [("parameter", ((2, 3), torch.float32))] * 2
    apart = made(two, "x")
    save(tmp_path / "apart", apart)
    one = made(two, "y")
    one.parameter1 = one.parameter0
    before = bits(one.get_parameter("parameter0"))
    with pytest.raises(CheckpointError, match="'parameter0' and 'parameter1' are one tensor here, and two in") as error:
        load(tmp_path / "apart", one)
    message(error)
    assert bits(one.get_parameter("parameter0")) == before
    save(tmp_path / "one", one)
    load(tmp_path / "one", apart)
    assert bits(apart.get_parameter("parameter0")) == bits(apart.get_parameter("parameter1")) == before


# ---- Wrapped models ---------------------------------------------------------------------------------------


def inside(model: Any) -> Any:
    """Return a model with a part that is compiled by itself."""
    model[0] = torch.compile(model[0])
    return model


WRAPS: dict[str, Callable[[Any], Any]] = {
    "compiled": torch.compile,
    "a compiled part": inside,
    "in parallel": DataParallel,
    "compiled, in parallel": lambda model: DataParallel(torch.compile(model)),
}


def a_model(seed: str) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.ModuleDict({"module": nn.Linear(4, 2)}))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(synthetic(f"{seed} {name}", p.shape, p.dtype))
    return model


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("turned", [False, True])
def test_a_wrapped_model_and_a_plain_one_load_each_other(tmp_path: Path, wrap: str, turned: bool) -> None:
    model, other = a_model("one"), a_model("two")
    names = list(model.state_dict())
    wrapped, also = (model, WRAPS[wrap](other)) if turned else (WRAPS[wrap](model), other)
    optimizer, another = MuonW(wrapped), MuonW(also)
    train(model, optimizer, 1)
    save(tmp_path / "saved", wrapped, optimizer)
    load(tmp_path / "saved", also, another)
    assert list(weights(tmp_path / "saved")) == names
    assert states(another) == states(optimizer)
    assert list(map(bits, other.parameters())) == list(map(bits, model.parameters()))


# ---- The way out ------------------------------------------------------------------------------------------


def test_weights_become_a_file_of_torch_also_in_a_shell(tmp_path: Path) -> None:
    model = a_model("one")
    save(tmp_path / "saved", model, MuonW(model))
    to_torch(tmp_path / "saved", tmp_path / "one.pt")
    done = worlds.finish("-m", "distmuon.checkpoint", str(tmp_path / "saved"), str(tmp_path / "two.pt"))
    assert done == (0, "", "")
    for file in ("one.pt", "two.pt"):
        (other := a_model("two")).load_state_dict(torch.load(tmp_path / file, weights_only=True))
        assert list(map(bits, other.parameters())) == list(map(bits, model.parameters()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.pt", "saved", "two.pt"]
    refused = worlds.finish("-m", "distmuon.checkpoint", str(tmp_path / "none"), str(tmp_path / "x.pt"))
    assert refused == (2, "", f"error: {tmp_path / 'none'} is no folder; give that of a checkpoint.\n")
