"""Which parameter goes to Muon and which to AdamW, the reasons printed, and what Muon refuses."""

import warnings

import pytest
import torch
from helpers_math import message
from torch import nn

from distmuon.optim.routing import check_muon_parameter, refuse_unknown, refuse_unknown_in_group, split_parameters


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
    assert names(groups, "muon") == ["block.up.weight"]
    assert names(groups, "adamw") == [
        "gain",
        "embed.weight",
        "block.up.bias",
        "block.norm.weight",
        "block.norm.bias",
        "block.conv.weight",
        "block.conv.bias",
        "head.weight",
        "head.bias",
    ]


def test_every_trainable_parameter_is_given_out_exactly_once() -> None:
    model = Tiny()
    given = [parameter for group in split_parameters(model) for _, parameter in group["params"]]
    assert len(given) == len({id(p) for p in given})
    assert {id(p) for p in given} == {id(p) for p in model.parameters() if p.requires_grad}


def test_a_frozen_parameter_goes_nowhere() -> None:
    groups = split_parameters(Tiny())
    assert not any("frozen" in name for algorithm in ("muon", "adamw") for name in names(groups, algorithm))


def test_tied_weights_are_listed_once_under_their_first_name() -> None:
    adamw = names(split_parameters(Tiny(tied=True)), "adamw")
    assert "embed.weight" in adamw
    assert "head.weight" not in adamw


def test_an_embedding_stays_with_adamw_even_when_a_linear_layer_holds_it_first() -> None:
    model = nn.Module()
    model.project = nn.Linear(4, 10, bias=False)
    model.tokens = nn.Embedding(10, 4)
    model.project.weight = model.tokens.weight
    assert names(split_parameters(model), "muon") == []
    assert names(split_parameters(model), "adamw") == ["project.weight"]


def test_a_table_of_bags_is_an_embedding_too() -> None:
    assert names(split_parameters(nn.Sequential(nn.EmbeddingBag(10, 4))), "muon") == []


def test_heads_are_known_by_the_last_part_of_their_name() -> None:
    model = nn.ModuleDict({"head": nn.Linear(2, 2, bias=False), "classifier": nn.Linear(2, 2, bias=False)})
    nested = nn.ModuleDict({"model": model})
    assert names(split_parameters(nested), "muon") == ["model.classifier.weight"]
    assert names(split_parameters(nested, heads=["classifier"]), "muon") == ["model.head.weight"]


def test_groups_without_parameters_are_left_out() -> None:
    (group,) = split_parameters(nn.Sequential(nn.LayerNorm(3)))
    assert group["algorithm"] == "adamw"


def test_groups_can_be_handed_to_an_optimizer_with_their_names() -> None:
    (group,) = split_parameters(nn.Sequential(nn.Linear(3, 3, bias=False)))
    optimizer = torch.optim.SGD([group], lr=0.1)
    assert optimizer.param_groups[0]["param_names"] == ["0.weight"]


def test_explain_prints_one_line_with_the_reason_for_each_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    groups = split_parameters(Tiny(tied=False), explain=True)
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert sorted(lines) == sorted(names(groups, "muon") + names(groups, "adamw"))
    for name, words in {
        "embed.weight": ["10x4", "adamw", "embedding"],
        "block.up.weight": ["8x4", "muon", "hidden matrix"],
        "block.up.bias": ["8", "adamw", "1-D"],
        "block.conv.weight": ["4x8x3", "adamw", "3-D"],
        "gain": ["adamw", "0-D"],
        "head.weight": ["10x4", "adamw", "output head"],
    }.items():
        assert all(word in lines[name] for word in words), lines[name]


def test_nothing_is_printed_without_being_asked(capsys: pytest.CaptureFixture[str]) -> None:
    split_parameters(Tiny())
    assert capsys.readouterr().out == ""


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


def test_a_parameter_without_storage_is_refused_with_its_name_and_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"'up\.weight' is on the meta device.*to_empty") as error:
        check_muon_parameter("up.weight", torch.zeros(2, 2, device="meta"))
    message(error)


def test_what_a_group_does_not_have_is_refused_by_name_and_value_and_its_notes_are_not() -> None:
    group = {"params": [], "param_names": [], "lr": 0.1, "initial_lr": 0.1, "name": "hidden", "max_momentum": 0.9}
    refuse_unknown_in_group(group, ["lr"], "Muon")
    with pytest.raises(TypeError, match=r"'momentun' \(0\.5\), 'maximize' \(False\).*a group of Muon has lr, momentum"):
        refuse_unknown_in_group(group | {"momentun": 0.5, "maximize": False}, ["lr", "momentum"], "Muon")
    with pytest.raises(TypeError, match=r"'name' \('hidden'\); Muon has lr\.$") as error:
        refuse_unknown({"lr": 0.1, "name": "hidden"}, ["lr"], "Muon")
    message(error)


@pytest.mark.parametrize(
    "name",
    [
        "embed.weight",
        "model.embed_tokens.weight",
        "token_embedding.weight",
        "wte.weight",
        "h.wpe",
        "lm_head",
        "head.weight",
        "model.head",
        "heads.head.weight",
        "classifier.weight",
    ],
)
def test_what_looks_like_an_embedding_or_head_gets_a_warning_by_name(name: str) -> None:
    with pytest.warns(UserWarning, match=f"'{name}' looks like an embedding"):
        check_muon_parameter(name, torch.zeros(2, 2))


@pytest.mark.parametrize(
    "name",
    ["fc1.weight", "blocks.0.attention.qkv.weight", "overhead.weight", "classifier.0.weight", "heads.weight", "#0"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_hidden_matrix_is_taken_silently(name: str, dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_muon_parameter(name, torch.zeros(2, 3, dtype=dtype))
