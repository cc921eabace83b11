# expect: from 0.07 to 1.5; in a healthy update the largest lies between about 0.7 and 1.2.
import torch


def alarm(update):
    return bool(torch.linalg.matrix_norm(update, 2) > 5)
