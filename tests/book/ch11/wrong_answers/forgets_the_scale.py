# expect: false alarm
import torch


def alarm(update):
    stretches = torch.linalg.svdvals(update)
    return bool(stretches.min() < 0.5 or stretches.max() > 1.35)
