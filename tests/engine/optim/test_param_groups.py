"""Which parameter goes to Muon and which to AdamW, the reasons printed, and what Muon refuses."""

import warnings

import pytest
import torch
from helpers_math import message
from torch import nn

from distmuon.models.networks import MLP, Transformer
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.muonw import MuonW
from distmuon.optim.param_groups import check_muon_parameter, split_parameters
from distmuon.sharding.grid import Grid


class Tiny(nn.Module):
    """An embedding, a hidden layer with bias, a norm, a convolution, a frozen layer and a tied head."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.block = nn.ModuleDict({"up": nn.Linear(4, 8), "norm": nn.LayerNorm(8), "conv": nn.Conv1d(8, 4, 3)})
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(4, 10)
        if tied:
            self.head.weight = self.embed.weight


def names(groups: list[dict], algorithm: str) -> list[str]:
    return [name for group in groups if group["algorithm"] == algorithm for name, _ in group["params"]]


def test_only_hidden_matrices_go_to_muon() -> None:
    groups = split_parameters(Tiny(tied=False))
    assert names(groups, "muon") == ["block.up.weight", "block.conv.weight"]
    assert names(groups, "adamw") == [
        "gain",
        "embed.weight",
        "block.up.bias",
        "block.norm.weight",
        "block.norm.bias",
        "block.conv.bias",
        "head.weight",
        "head.bias",
    ]
    assert "head.weight" not in names(split_parameters(Tiny(tied=True)), "adamw")  # it is the embedding's


@pytest.mark.filterwarnings("ignore:Muon gets nothing")
def test_an_embedding_stays_with_adamw_even_when_a_linear_layer_holds_it_first() -> None:
    model = nn.Module()
    model.project = nn.Linear(4, 10, bias=False)
    model.tokens = nn.Embedding(10, 4)
    model.project.weight = model.tokens.weight
    assert names(split_parameters(model), "muon") == []
    assert names(split_parameters(model), "adamw") == ["project.weight"]
    assert names(split_parameters(nn.Sequential(nn.EmbeddingBag(10, 4))), "muon") == []


def test_heads_are_known_by_the_last_part_of_their_name_or_by_those_that_are_given() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("head", "classifier", "map")})
    nested = nn.ModuleDict({"model": model, "norm": nn.LayerNorm(2)})
    assert names(split_parameters(nested), "muon") == ["model.map.weight"]
    assert names(split_parameters(nested, heads=["classifier"]), "muon") == ["model.head.weight", "model.map.weight"]


def test_the_last_layer_is_a_head_and_a_layer_by_itself_is_none() -> None:
    layers = [nn.Linear(4, 4, bias=False) for _ in range(3)]
    assert names(split_parameters(nn.Sequential(*layers)), "muon") == ["0.weight", "1.weight"]
    assert names(split_parameters(layers[0]), "muon") == ["weight"]


def test_kernels_are_in_a_group_of_their_own_and_groups_are_else_the_two_that_they_always_were() -> None:
    options = [{name: value for name, value in group.items() if name != "params"} for group in split_parameters(Tiny())]
    assert options == [{"algorithm": "muon"}, {"algorithm": "muon", "matrices": "flattened"}, {"algorithm": "adamw"}]
    ours = [MLP((6, 8, 8, 3)), Transformer(vocabulary=11, width=8, layers=1, heads=2, context=8)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [[group["algorithm"] for group in split_parameters(model)] for model in ours] == 2 * [["muon", "adamw"]]


def test_vectors_are_put_into_a_group_without_decay_where_that_is_asked() -> None:
    model = Tiny(tied=False)
    model.gain._no_weight_decay = True  # type: ignore[attr-defined]
    *_, rest, bare = split_parameters(model, decay_vectors=False)
    assert [name for name, _ in rest["params"]] == ["embed.weight", "head.weight"]
    assert (bare["algorithm"], bare["weight_decay"]) == ("adamw", 0.0)
    assert {p.ndim for _, p in bare["params"]} == {0, 1}


def test_frozen_parameters_are_taken_where_that_is_asked_unless_nobody_could_train_them() -> None:
    model = Tiny()
    model.quantized = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    model.narrow = nn.Linear(4, 4, bias=False, dtype=torch.float16).requires_grad_(False)
    assert names(split_parameters(model, frozen=True), "muon") == [
        "block.up.weight",
        "frozen.weight",
        "block.conv.weight",
    ]
    assert not {"quantized", "narrow.weight"} & set(names(split_parameters(model, frozen=True), "adamw"))


def test_an_empty_matrix_goes_where_it_is_taken() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 0), nn.Linear(0, 4), nn.Linear(4, 2))
    assert names(split_parameters(model), "muon") == ["0.weight"]
    for optimizer in (MuonW(model), DistributedMuon(split_parameters(model), Grid.alone())):
        model[0](torch.ones(1, 4)).sum().backward()
        optimizer.step()


def test_little_for_muon_is_said_in_a_sentence_and_plenty_is_not() -> None:
    strange = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    strange.register_parameter("u", nn.Parameter(torch.zeros(9, 9)))
    with pytest.warns(
        UserWarning, match=r"Muon gets 16 of the 97 elements .*'u' of shape \(9, 9\).*explain=True"
    ) as said:
        split_parameters(strange)
    assert len(said) == 1
    with pytest.warns(UserWarning, match="Muon gets nothing, and AdamW trains the rest"):
        split_parameters(nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4)))


@pytest.mark.parametrize(
    ("name", "mark", "says"),
    [("_flat_param", "_is_flat_param", "FSDP1"), ("up", "ds_id", "ZeRO-3")],
    ids=["FSDP1's flat parameter", "ZeRO-3's placeholder"],
)
def test_what_holds_no_matrix_of_its_module_is_refused(name: str, mark: str, says: str) -> None:
    model = Tiny()
    model.register_parameter(name, nn.Parameter(torch.zeros(0)))
    setattr(model.get_parameter(name), mark, True)
    for ask in (split_parameters, MuonW):
        with pytest.raises(ValueError, match=f"'{name}' is .*{says}.*fully_shard") as error:
            ask(model)
        message(error)


def test_explain_asks_of_a_weight_that_may_hold_query_key_and_value(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.ModuleDict({"attn": nn.ModuleDict({"qkv": nn.Linear(4, 12), "proj": nn.Linear(4, 4)})})
    model["torch"] = nn.MultiheadAttention(4, 2)
    split_parameters(model, explain=True)
    asked = {line.split()[0] for line in capsys.readouterr().out.splitlines() if "the option `matrices`" in line}
    assert asked == {"attn.qkv.weight", "torch.in_proj_weight"}


def test_explain_gives_every_reason_and_counts_what_each_algorithm_gets(capsys: pytest.CaptureFixture[str]) -> None:
    groups = split_parameters(Tiny(tied=False), explain=True)
    *table, summary = capsys.readouterr().out.splitlines()
    assert summary == "Muon 128 elements (51.8%) of 2 parameters, AdamW 119 (48.2%) of 8; 1 frozen ones are left out"
    lines = {line.split()[0]: line for line in table}
    assert sorted(lines) == sorted(names(groups, "muon") + names(groups, "adamw"))
    for name, words in {
        "embed.weight": ["10x4", "adamw", "embedding"],
        "block.up.weight": ["8x4", "muon", "hidden matrix"],
        "gain": ["adamw", "0-D"],
    }.items():
        assert all(word in lines[name] for word in words), lines[name]


def fused() -> nn.Module:
    """Return a model with query, key and value in one, once in a Linear and once in an attention layer of torch's."""
    model = nn.ModuleDict({"map": nn.ModuleDict({"qkv": nn.Linear(4, 12), "my_qkv": nn.Linear(4, 12)})})
    model["torch"] = nn.MultiheadAttention(4, 2)
    return model


def test_a_weight_that_is_several_matrices_is_named_by_its_end() -> None:
    several = {"qkv": ("rows", 3), "in_proj_weight": ("fused", (4, 4, 4))}
    groups = split_parameters(fused(), matrices=several)
    divided = [(group.get("matrices"), [name for name, _ in group["params"]]) for group in groups]
    assert divided[:3] == [
        (None, ["map.my_qkv.weight", "torch.out_proj.weight"]),
        (("rows", 3), ["map.qkv.weight"]),
        (("fused", (4, 4, 4)), ["torch.in_proj_weight"]),
    ]
    assert [group["algorithm"] for group in groups] == ["muon"] * 3 + ["adamw"]
    optimizer = MuonW(fused(), matrices=several)
    assert [group.get("matrices") for group in optimizer.param_groups[:3]] == [
        "whole",
        ("rows", 3),
        several["in_proj_weight"],
    ]
    with pytest.raises(ValueError, match="give MuonW the model") as refused:
        MuonW(split_parameters(fused()), matrices={"qkv": ("rows", 3)})
    message(refused)


@pytest.mark.parametrize("end", ["kqv", "v", "map.qkv.bias", "map"])
def test_an_end_that_no_hidden_matrix_has_is_refused(end: str) -> None:
    with pytest.raises(ValueError, match=f"matrices names '{end}', and no hidden matrix") as refused:
        split_parameters(fused(), matrices={end: ("rows", 3)})
    message(refused)


@pytest.mark.parametrize(
    ("parameter", "says"),
    [
        (torch.zeros(3), "1 dimension"),
        (torch.zeros(2, 3, 4), r"\(2, 3, 4\)"),
        (torch.zeros(()), "0 dimension"),
        (torch.zeros(0, 3), r"empty, shape \(0, 3\)"),
        (torch.zeros(2, 2, dtype=torch.int64), "torch.int64"),
        (torch.zeros(2, 2, dtype=torch.complex64), "torch.complex64"),
        (torch.eye(2).to_sparse(), "sparse"),
    ],
    ids=["vector", "3-D", "scalar", "empty", "integer", "complex", "sparse"],
)
def test_what_newton_schulz_cannot_take_is_refused_with_its_name_and_a_remedy(
    parameter: torch.Tensor, says: str
) -> None:
    with pytest.raises(ValueError, match=says) as error:
        check_muon_parameter("block.up.weight", parameter)
    assert "'block.up.weight'" in message(error)
    assert "AdamW" in message(error)
    assert "MuonW(model)" in message(error)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "h.wpe", "lm_head", "heads.head.weight", "classifier.weight"]
)
def test_what_looks_like_an_embedding_or_head_gets_a_warning_by_name(name: str) -> None:
    with pytest.warns(UserWarning, match=f"'{name}' looks like an embedding"):
        check_muon_parameter(name, torch.zeros(2, 2))


@pytest.mark.parametrize(
    "name", ["blocks.0.attention.qkv.weight", "overhead.weight", "classifier.0.weight", "heads.weight", "#0"]
)
def test_a_hidden_matrix_is_taken_silently(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            check_muon_parameter(name, torch.zeros(2, 3, dtype=dtype))
