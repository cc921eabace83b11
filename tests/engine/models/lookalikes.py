"""Small models with the modules, names and shapes of well-known ones, and what of each belongs to Muon.

Nothing here is run: the structure is all that matters. A row of MUON ends in "*" where all that begin so are meant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

D, H = 16, 40  # width, hidden width


def module(**parts: Any) -> nn.Module:
    """Return a module with these modules and parameters, in this order; a tuple is the shape of a parameter."""
    made = nn.Module()
    for name, part in parts.items():
        setattr(made, name, nn.Parameter(torch.zeros(part)) if isinstance(part, tuple) else part)
    return made


def linear(inputs: int = D, outputs: int = D, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


def named(name: str, base: type = nn.Module) -> Any:
    """Return a class of this name."""
    return type(name, (base,), {})


class Rows(nn.Module):
    """A module that holds one bare [rows, width], such as a router of Mixtral, or a linear layer by hand."""

    def __init__(self, rows: int, width: int, name: str = "weight") -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.zeros(rows, width)))


class Conv1D(nn.Module):
    """Hugging Face's, of GPT-2: a linear layer whose weight is [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.zeros(nx, nf)), nn.Parameter(torch.zeros(nf))


class Experts(nn.Module):
    """All experts of a layer in two parameters, as in Mixtral, with gpt-oss's biases if asked."""

    def __init__(self, number: int = 8, bias: bool = False) -> None:
        super().__init__()
        self.num_experts = number
        self.gate_up_proj = nn.Parameter(torch.zeros(number, 2 * H, D))
        self.down_proj = nn.Parameter(torch.zeros(number, D, H))
        if bias:
            self.gate_up_proj_bias = nn.Parameter(torch.zeros(number, 2 * H))
            self.down_proj_bias = nn.Parameter(torch.zeros(number, D))


def attention() -> nn.Module:
    return module(q_proj=linear(), k_proj=linear(D, 8), v_proj=linear(D, 8), o_proj=linear())


def swiglu(hidden: int = H) -> nn.Module:
    return module(gate_proj=linear(D, hidden), up_proj=linear(D, hidden), down_proj=linear(hidden, D))


def decoder(layers: list[nn.Module], vocabulary: int = 96, **head: Any) -> nn.Module:
    model = module(embed_tokens=nn.Embedding(vocabulary, D), layers=nn.ModuleList(layers), norm=nn.RMSNorm(D))
    return module(model=model, **head or {"lm_head": linear(D, vocabulary)})


def gpt_oss() -> nn.Module:
    mlp = module(router=module(weight=(8, D), bias=(8,)), experts=Experts(bias=True))
    return decoder([module(self_attn=attention(), mlp=mlp)])


def deepseek() -> nn.Module:
    attn = module(
        q_a_proj=linear(D, 8), q_b_proj=linear(8, 24), kv_a_proj_with_mqa=linear(D, 12), kv_b_proj=linear(8, 32)
    )
    router = named("DeepseekV3TopkRouter", Rows)(6, D)
    one_by_one = module(gate=router, experts=nn.ModuleList(swiglu() for _ in range(6)), shared_experts=swiglu())
    gate = module(wg=linear(D, 4), w_noise=(D, 4))
    switch = module(
        router=module(classifier=linear(D, 3)), experts=nn.ModuleDict({f"expert_{i}": swiglu() for i in range(3)})
    )
    blocks = [
        module(self_attn=attn, mlp=one_by_one),
        module(moe=module(gate=gate, experts=Experts(4))),
        module(mlp=switch),
    ]
    return decoder([*blocks, module(mlp=swiglu())])


def resnet18() -> nn.Module:
    def block(a: int, b: int) -> nn.Module:
        parts = dict(conv1=nn.Conv2d(a, b, 3, bias=False), bn1=nn.BatchNorm2d(b), conv2=nn.Conv2d(b, b, 3, bias=False))
        if a != b:
            parts["downsample"] = nn.Sequential(nn.Conv2d(a, b, 1, bias=False), nn.BatchNorm2d(b))
        return module(**parts)

    layers = {f"layer{i + 1}": nn.Sequential(block(a, b), block(b, b)) for i, (a, b) in enumerate(CHANNELS)}
    return module(conv1=nn.Conv2d(3, 64, 7, bias=False), bn1=nn.BatchNorm2d(64), **layers, fc=nn.Linear(512, 10))


CHANNELS = ((64, 64), (64, 128), (128, 256), (256, 512))


def mobilenet() -> nn.Module:
    stem, depthwise, pointwise = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 24, 1)
    inner = nn.Sequential(nn.Sequential(stem, nn.ReLU()), nn.Sequential(depthwise), pointwise)
    return module(features=inner, classifier=nn.Sequential(nn.Linear(24, 20), nn.ReLU(), nn.Linear(20, 10)))


def gpt2() -> nn.Module:
    def block() -> nn.Module:
        attn, mlp = (
            module(c_attn=Conv1D(3 * D, D), c_proj=Conv1D(D, D)),
            module(c_fc=Conv1D(64, D), c_proj=Conv1D(D, 64)),
        )
        return module(ln_1=nn.LayerNorm(D), attn=attn, ln_2=nn.LayerNorm(D), mlp=mlp)

    words = nn.Embedding(3 * D, D)  # as wide as the fused query, key and value
    blocks, head = nn.ModuleList([block(), block()]), linear(D, 3 * D)
    head.weight = words.weight
    return module(transformer=module(wte=words, wpe=nn.Embedding(64, D), h=blocks), lm_head=head)


def llama() -> nn.Module:
    """Meta's own names, as wide as its vocabulary has tokens."""
    layers = nn.ModuleList()
    for _ in range(2):
        ffn = module(w1=linear(D, H), w2=linear(H, D), w3=linear(D, H))
        layers.append(module(attention=module(wq=linear(), wk=linear(), wv=linear(), wo=linear()), feed_forward=ffn))
    return module(tok_embeddings=nn.Embedding(D, D), layers=layers, norm=nn.RMSNorm(D), output=linear())


def head_first() -> nn.Module:
    """A head that is neither last nor called one: it is as wide as the vocabulary."""
    return module(embed=nn.Embedding(96, D), to_tokens=linear(D, 96), blocks=nn.ModuleList([attention()]))


def vit() -> nn.Module:
    blocks = nn.Sequential()
    for _ in range(2):
        mlp = module(fc1=linear(D, H), fc2=linear(H, D))
        blocks.append(module(norm1=nn.LayerNorm(D), attn=module(qkv=linear(D, 3 * D), proj=linear()), mlp=mlp))
    patches = module(proj=nn.Conv2d(3, D, 4, 4))
    tokens: dict[str, Any] = dict(cls_token=(1, 1, D), pos_embed=(1, 9, D), patch_embed=patches)
    return module(**tokens, blocks=blocks, norm=nn.LayerNorm(D), head=nn.Linear(D, 10))


def mamba() -> nn.Module:
    mixer = module(
        A_log=(2 * D, 4), D=(2 * D,), conv1d=nn.Conv1d(2 * D, 2 * D, 4, groups=2 * D), in_proj=linear(D, 4 * D),
        x_proj=linear(2 * D, 9), dt_proj=linear(2, 2 * D, bias=True), out_proj=linear(2 * D, D),
    )  # fmt: skip
    layers = nn.ModuleList([module(norm=nn.RMSNorm(D), mixer=mixer)])
    return module(backbone=module(embeddings=nn.Embedding(96, D), layers=layers), lm_head=linear(D, 96))


def t5() -> nn.Module:
    stacks = {}
    for side in ("encoder", "decoder"):
        layers = [module(q=linear(), k=linear(), v=linear(), o=linear()) for _ in range(2)]
        layers[0].relative_attention_bias = nn.Embedding(32, 2)
        layers.append(module(wi_0=linear(D, H), wi_1=linear(D, H), wo=linear(H, D)))
        blocks = nn.ModuleList([module(layer=nn.ModuleList(layers))])
        stacks[side] = module(block=blocks, final_layer_norm=nn.RMSNorm(D))
    return module(shared=nn.Embedding(96, D), **stacks, lm_head=linear(D, 96))


class HasClassifier(nn.Module):
    """As timm's models have it: the head's name says nothing, and it does not come last."""

    def __init__(self) -> None:
        super().__init__()
        self.last_map = nn.Linear(D, 7)
        self.stages = nn.ModuleList([swiglu()])

    def get_classifier(self) -> nn.Module:
        return self.last_map


class SaysWhatItIs(nn.Module):
    """As Hugging Face's models do; some of their methods only raise."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.patches = nn.Embedding(96, D), nn.Conv2d(12, D, 4)
        self.vocabulary_map, self.blocks = linear(D, 5), nn.ModuleList([attention()])

    def get_input_embeddings(self) -> nn.Module:
        return self.patches

    def get_output_embeddings(self) -> nn.Module:
        return self.vocabulary_map

    def get_classifier(self) -> nn.Module:
        raise NotImplementedError


def whisper() -> nn.Module:
    ears = dict(conv1=nn.Conv1d(80, D, 3), conv2=nn.Conv1d(D, D, 3), embed_positions=nn.Embedding(30, D))
    words = nn.Embedding(96, D)
    mouth = dict(embed_tokens=words, embed_positions=named("WhisperPositionalEmbedding", Rows)(20, D))
    sides = {}
    for side, parts in (("encoder", ears), ("decoder", mouth)):
        block = module(self_attn=attention(), fc1=linear(D, H), fc2=linear(H, D))
        sides[side] = module(**parts, layers=nn.ModuleList([block]))
    head = linear(D, 96)
    head.weight = words.weight
    return module(model=module(**sides), proj_out=head)


def bert() -> nn.Module:
    attended, fed = (module(dense=linear(inputs, D), LayerNorm=nn.LayerNorm(D)) for inputs in (D, H))
    read = module(query=linear(), key=linear(), value=linear())
    layer = module(attention=module(self=read, output=attended), output=fed)
    tables = module(word_embeddings=nn.Embedding(96, D), position_embeddings=nn.Embedding(D, D))
    model = module(embeddings=tables, encoder=module(layer=nn.ModuleList([layer])), pooler=module(dense=linear()))
    transform = module(dense=linear(), LayerNorm=nn.LayerNorm(D))
    predictions = module(transform=transform, decoder=linear(D, 96, True))
    return module(bert=model, cls=module(predictions=predictions, seq_relationship=linear(D, 2)))


def by_hand() -> nn.Module:
    """Linear layers, attention and experts as people write them, beside tables, prompts and codebooks of their own."""
    own = named("MyLinear", Rows)(H, D)
    block = module(w_up=(H, D), w_down=(D, H), wq=(D, D), W_O=(D, D), mixer=own, u=(D, D), layer_scale=(D, 1))
    stacked = module(w1=(4, D, H), w2=(4, H, D), b1=(4, H), gate=(D, 4))
    held = module(soft_prompt=(5, D), codebook=named("Codebook", Rows)(32, D), latents=(6, D), rel_pos_h=(13, D))
    heads = module(W_Q=(2, D, 8), bilinear=nn.Bilinear(3, 4, 5), norm=nn.LayerNorm((4, D)))
    tables = module(words=named("VocabParallelEmbedding", Rows)(96, D), query_embed=(10, D))
    layers = nn.ModuleList([block, stacked, heads])
    return module(tables=tables, held=held, layers=layers, rnn=nn.LSTM(D, 12), score=nn.Linear(12, 3))


def normalized() -> nn.Module:
    """Weight norm in both of torch's forms, and spectral norm."""
    old = nn.utils.weight_norm(nn.Linear(D, H))  # type: ignore[no-untyped-call]
    new, spectral = (
        nn.utils.parametrizations.weight_norm(nn.Linear(H, D)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(D, D)),
    )
    return module(blocks=nn.ModuleList([old, new, spectral]), v_head=module(summary=nn.Linear(D, 1)))


def generator() -> nn.Module:
    return nn.Sequential(nn.Conv2d(16, 24, 3), nn.ConvTranspose2d(24, 8, 4), nn.Conv2d(8, 3, 3), nn.Tanh())


ATTENTION = [f"self_attn.{side}_proj.weight" for side in "qkvo"]
SIDES = ("encoder", "decoder")
T5 = [*(f"{i}.{n}" for i in (0, 1) for n in "qkvo"), "2.wi_0", "2.wi_1", "2.wo"]
MUON: dict[Callable[[], nn.Module], dict[str, list[str]]] = {  # model -> matrices -> parameters
    gpt_oss: {
        "whole": [f"model.layers.0.{name}" for name in ATTENTION],
        "stacked": ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"],
    },
    deepseek: {
        "whole": [
            *(f"model.layers.0.{part}.*" for part in ("self_attn", "mlp.experts", "mlp.shared_experts")),
            *("model.layers.2.mlp.experts.*", "model.layers.3.mlp.*"),
        ],
        "stacked": ["model.layers.1.moe.experts.gate_up_proj", "model.layers.1.moe.experts.down_proj"],
    },
    resnet18: {
        "flattened": [
            *(f"layer{i}.{j}.conv{k}.weight" for i in (1, 2, 3, 4) for j in (0, 1) for k in (1, 2)),
            *(f"layer{i}.0.downsample.0.weight" for i in (2, 3, 4)),
        ]
    },
    mobilenet: {"whole": ["classifier.0.weight"], "flattened": ["features.2.weight"]},
    gpt2: {
        "whole": [
            f"transformer.h.{i}.{n}.weight"
            for i in (0, 1)
            for n in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        ]
    },
    llama: {"whole": ["layers.*"]},
    head_first: {"whole": ["blocks.*"]},
    vit: {"whole": [f"blocks.{i}.{n}.weight" for i in (0, 1) for n in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]},
    mamba: {"whole": [f"backbone.layers.0.mixer.{n}_proj.weight" for n in ("in", "x", "dt", "out")]},
    t5: {"whole": [f"{side}.block.0.layer.{name}.weight" for side in SIDES for name in T5]},
    HasClassifier: {"whole": ["stages.*"]},
    SaysWhatItIs: {"whole": ["blocks.*"]},
    whisper: {
        "whole": [f"model.{side}.layers.0.{n}" for side in SIDES for n in (*ATTENTION, "fc1.weight", "fc2.weight")],
        "flattened": ["model.encoder.conv1.weight", "model.encoder.conv2.weight"],
    },
    bert: {
        "whole": [
            *(f"bert.encoder.layer.0.attention.self.{n}.weight" for n in ("query", "key", "value")),
            *(f"bert.encoder.layer.0.{n}.dense.weight" for n in ("attention.output", "output")),
            *("bert.pooler.dense.weight", "cls.predictions.transform.dense.weight"),
        ]
    },
    by_hand: {
        "whole": [
            *(f"layers.0.{n}" for n in ("w_up", "w_down", "wq", "W_O", "mixer.weight")),
            *("rnn.weight_ih_l0", "rnn.weight_hh_l0"),
        ],
        "stacked": ["layers.1.w1", "layers.1.w2", "layers.2.W_Q"],
    },
    normalized: {
        "whole": [
            "blocks.0.weight_v",
            *(f"blocks.{i + 1}.parametrizations.weight.original{n}" for i, n in ((0, 1), (1, ""))),
        ]
    },
    generator: {"flattened": ["0.weight", "1.weight"]},
}
