"""A vision transformer of timm, whose query, key and value lie in one weight.

python timm_vit.py
"""

import timm
import torch
from task import DEVICE, STEPS
from torch.nn import functional as F

from distmuon import MuonW
from distmuon.models.digits import batch_rows, digits
from distmuon.sharding.grid import Grid

SIZES = {"embed_dim": 48, "depth": 3, "num_heads": 4, "num_classes": 10}
IMAGES = {"img_size": 8, "patch_size": 2, "in_chans": 1}  # handwritten digits

torch.manual_seed(0)
training, held_out = digits(Grid.alone(), seed=0)
model = timm.create_model("vit_tiny_patch16_224", **SIZES, **IMAGES).to(DEVICE)


def logits_of(images):
    """Return [n, digits] for [n, pixels]."""
    return model(images.float().view(-1, 1, 8, 8).to(DEVICE))


optimizer = MuonW(
    model, lr=1e-2, adamw_lr=3e-3, weight_decay=0.05, matrices={"qkv": ("rows", 3)}
)

for step in range(STEPS):
    rows = batch_rows(step, 64, len(training.labels), seed=0)
    labels = training.labels[rows].to(DEVICE)
    loss = F.cross_entropy(logits_of(training.images[rows]), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

with torch.no_grad():
    guesses = logits_of(held_out.images).argmax(dim=1).cpu()
right = (guesses == held_out.labels).float().mean()
print(f"held-out images that it reads rightly {right:.1%}")
print(f"loss {loss.item():.4f}")
