# expect: is off by
import torch


def orthogonalize(x, schedule):
    whole, x = x, x.float()
    q = identity = torch.eye(len(x))
    gram = x @ x.mT
    for step, (a, b, c) in enumerate(schedule):
        p = a * identity + b * gram + c * gram @ gram
        q = p @ q if step else p
        gram = p @ gram @ p if step < 4 else gram
    return q.double() @ whole
