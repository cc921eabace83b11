"""Wrong answers to the puzzle of chapter 11: above each stands what its reader must be told."""

import torch


# expect: false alarm: it rings for columns, rows, whole, other of the healthy optimizer
def always_rings(update):
    return True


# expect: in a healthy update the largest lies between about 0.7 and 1.2.
def compares_norms_only(update):
    rms = update.square().mean().sqrt()
    return bool(not 0.1 < rms < 0.4)


# expect: false alarm: it rings for a healthy update, of a momentum with weak directions
def distrusts_weak_directions(update):
    stretches = torch.linalg.svdvals(update) / (0.2 * max(update.shape) ** 0.5)
    return bool(stretches.min() < 0.5 or stretches.max() > 1.35)


# expect: false alarm
def forgets_the_scale(update):
    stretches = torch.linalg.svdvals(update)
    return bool(stretches.min() < 0.5 or stretches.max() > 1.35)


# expect: it stays silent although the optimizer has the exhibit 'block-wise Newton–Schulz' in it
def looks_for_nan(update):
    return bool(update.isnan().any())


# expect: from 0.07 to 1.5; in a healthy update the largest lies between about 0.7 and 1.2.
def rings_for_nothing_but_size(update):
    return bool(torch.linalg.matrix_norm(update, 2) > 5)
