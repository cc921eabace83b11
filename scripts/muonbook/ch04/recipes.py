"""The recipes of a public tutorial, so that its numbers can be checked, and seen under several seeds.

Source: JenWei0312/Muon_Tutorial, Muon.ipynb, commit a45b3e199a71. Its numbers are those of its stored outputs: one run
for each optimizer, without a seed. What was run there, in short:

- MNIST: an MLP of 784, 256, 128 and 10 features, pixels from 0 to 1, batches of 64, 3 epochs at a constant learning
  rate. Reported is the training loss averaged over the steps of epoch 3; no test image is looked at.
- CIFAR-10: a CNN, shifted and mirrored images, batches of 128, 5 epochs, the learning rate on a cosine that moves once
  per epoch. Reported are the test accuracy after epoch 5 and the training loss averaged over its steps.
- Its Muon is given *all* parameters: the output layer is orthogonalized too, and biases take Nesterov's momentum at
  the same learning rate. Its SGD on MNIST has no momentum.

Losses are means in nats. Models are float32. Newton–Schulz runs in bf16, as in the tutorial, where the hardware
multiplies bf16 natively, and in float32 elsewhere (`fast_paths.fast_dtype`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.flop_counter import FlopCounterMode

from distmuon.models import networks
from distmuon.optim.muon import Muon, scale
from distmuon.optim.param_groups import by_algorithm
from muonbook.ch04.search_space import Setting, muon_and_adamw
from muonbook.ch04.tasks import CNN, Convolution, shifted_and_flipped

Build = Callable[[nn.Module, float], list[Optimizer]]  # (model, learning rate) -> optimizers, stepped in turn

# ---- The optimizers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TutorialOptimizer:
    """An optimizer and the learning rate to begin with. written: whether the tutorial ran it so.

    build: (model, learning rate) -> optimizers, stepped one after the other.
    """

    title: str
    lr: float
    build: Build
    written: bool = True


def tutorial_muon(model: nn.Module, lr: float, compute_dtype: torch.dtype | str = "auto") -> list[Optimizer]:
    """Return Muon as the tutorial has it: every matrix, head included; biases by SGD with Nesterov's momentum.

    Its factor sqrt(max(1, rows / columns)) reads the last two sizes of a weight. For a convolution those are the 3 x 3
    of its filter, so the factor is 1; ours reads the matrix [outputs, 9 inputs], and is divided out again.
    """
    matrices = [module for module in model.modules() if getattr(module, "weight", None) is not None]
    groups = [{"params": [module.weight], "lr": lr / _extra_factor(module)} for module in matrices]
    options: dict[str, Any] = {"momentum_kind": "average", "scale": "original", "compute_dtype": compute_dtype}
    biases = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return [
        Muon(groups, momentum=0.95, weight_decay=0.0, **options),
        SGD(biases, lr=lr, momentum=0.95, nesterov=True),
    ]


def _extra_factor(module: nn.Module) -> float:
    """Return by how much our factor is greater than the tutorial's."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return scale(weight.shape, "original") if isinstance(module, Convolution) else 1.0


def paper_muon(model: nn.Module, lr: float) -> list[Optimizer]:
    """Return Muon as the paper has it: head and biases to AdamW, updates matched to its RMS, one rate and decay."""
    return muon_and_adamw(by_algorithm(model), Setting("muon", lr, 0.1, 0.95))


def alone(kind: type[Optimizer], **options: Any) -> Build:
    """Return what gives all parameters to one optimizer."""
    return lambda model, lr: [kind(model.parameters(), lr=lr, **options)]  # type: ignore[call-arg]


# ---- The recipes ------------------------------------------------------------------------------------------


class Reported(NamedTuple):
    """What the tutorial reports of one optimizer: mean training loss of the last epoch, test accuracy, seconds."""

    training_loss: float
    test_accuracy: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class TutorialRecipe:
    """How a network is trained, but for the optimizer.

    shape: of one image. cosine: whether the learning rate falls, once per epoch; else it is constant. mean, std: of the
    pixels from 0 to 1, one for each colour. augment: changes a training batch of uint8 images, by torch's generator.
    optimizers: by name; those whose steps cost most come first. reported: by name of an optimizer.
    """

    model: Callable[[], nn.Module]
    shape: tuple[int, int, int]
    batch: int
    epochs: int
    optimizers: dict[str, TutorialOptimizer]
    reported: dict[str, Reported]
    cosine: bool = False
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    augment: Callable[[Tensor], Tensor] | None = None

    @property
    def reported_time(self) -> float | None:
        """Muon's time over AdamW's, as the tutorial's tables have it; None where it reports none."""
        muon, adamw = self.reported["muon"].seconds, self.reported["adamw"].seconds
        return None if muon is None or adamw is None else muon / adamw

    def inputs(self, images: Tensor) -> Tensor:
        """Return uint8 images [n, channels, height, width] as the network takes them, float32."""
        mean, std = (torch.tensor(values, device=images.device).view(-1, 1, 1) for values in (self.mean, self.std))
        scaled = (images / 255 - mean) / std
        return scaled.flatten(1) if self.shape[0] == 1 else scaled  # the grey ones go to an MLP

    def share_of_lr(self, epoch: int, epochs: int) -> float:
        """Return by what the learning rate is multiplied in `epoch`, 0 to epochs - 1."""
        return (1 + math.cos(math.pi * epoch / epochs)) / 2 if self.cosine else 1.0


MUON = {
    "muon": TutorialOptimizer("Muon", 0.01, tutorial_muon),
    "muon_adamw": TutorialOptimizer("Muon + AdamW", 0.002, paper_muon, written=False),
}
RECIPES: dict[str, TutorialRecipe] = {
    "mnist": TutorialRecipe(
        lambda: networks.MLP((784, 256, 128, 10)),
        shape=(1, 28, 28),
        batch=64,
        epochs=3,
        optimizers=MUON
        | {
            "adamw": TutorialOptimizer("AdamW", 0.001, alone(AdamW, weight_decay=0.01)),
            "sgd": TutorialOptimizer("SGD", 0.01, alone(SGD)),
            "sgd_momentum": TutorialOptimizer("SGD momentum", 0.01, alone(SGD, momentum=0.9), written=False),
        },
        reported={
            "muon": Reported(0.0475, seconds=28.86),
            "adamw": Reported(0.0717, seconds=22.71),
            "sgd": Reported(0.3931, seconds=21.84),
        },
    ),
    "cifar10": TutorialRecipe(
        CNN,
        shape=(3, 32, 32),
        batch=128,
        epochs=5,
        optimizers=MUON
        | {
            "adamw": TutorialOptimizer("AdamW", 0.001, alone(AdamW, weight_decay=1e-4)),
            "sgd_momentum": TutorialOptimizer("SGD momentum", 0.01, alone(SGD, momentum=0.9, weight_decay=5e-4)),
        },
        reported={
            "muon": Reported(0.6279, test_accuracy=0.8079, seconds=49.47),
            "adamw": Reported(0.8955, test_accuracy=0.7166, seconds=50.25),
            "sgd_momentum": Reported(1.1023, test_accuracy=0.6440),
        },
        cosine=True,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        augment=shifted_and_flipped,  # the padding is black, as in the tutorial, since pixels are scaled afterwards
    ),
}


# ---- Around a run -----------------------------------------------------------------------------------------


def default_weights_(model: nn.Module) -> nn.Module:
    """Give every layer torch's own initial weights in place: uniform, up to 1 / sqrt(inputs) either way, biases too.

    Drawn from torch's generator in the order in which `nn.Linear` and `nn.Conv2d` draw. Our own layers start at zero.
    """
    for module in model.modules():
        if isinstance(weight := getattr(module, "weight", None), nn.Parameter):
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(module.bias, -bound, bound)  # type: ignore[arg-type]
    return model


def step_flops(recipe: TutorialRecipe) -> dict[str, int]:
    """Return what one step costs in floating-point operations of matrix products and convolutions, as torch counts.

    "network": forward and backward of a whole batch. The rest: each optimizer's update. SGD and AdamW have no products,
    so they count as 0; what they do element by element is not counted for anybody.
    """
    images, labels = torch.zeros(recipe.batch, *recipe.shape, dtype=torch.uint8), torch.zeros(recipe.batch).long()
    found: dict[str, int] = {}
    for name, optimizer in recipe.optimizers.items():
        model = default_weights_(recipe.model())
        optimizers = optimizer.build(model, optimizer.lr)
        with FlopCounterMode(display=False) as network:
            F.cross_entropy(model(recipe.inputs(images)), labels).backward()
        with FlopCounterMode(display=False) as update:
            for one in optimizers:
                one.step()
        found |= {"network": network.get_total_flops(), name: update.get_total_flops()}
    return found
