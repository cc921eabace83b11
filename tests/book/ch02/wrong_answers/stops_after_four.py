# expect: the result for rank 0's matrix of 48 x 192 is off by
import torch


def orthogonalize(x, schedule):
    q = identity = torch.eye(len(x), dtype=x.dtype)
    gram = x @ x.mT
    for a, b, c in schedule[:4]:
        p = a * identity + b * gram + c * gram @ gram
        q, gram = p @ q, p @ gram @ p
    return q @ x
