# expect: false alarm: it rings for a healthy update, of a momentum with weak directions
import torch


def alarm(update):
    stretches = torch.linalg.svdvals(update) / (0.2 * max(update.shape) ** 0.5)
    return bool(stretches.min() < 0.5 or stretches.max() > 1.35)
