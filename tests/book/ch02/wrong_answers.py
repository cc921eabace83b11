"""Wrong answers to the puzzle of chapter 2: above each stands what its reader must be told."""

import torch


# expect: svd is work that the counter does not see
def asks_for_the_svd(x, quintics):
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    for a, b, c in quintics:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


# expect: is off by
def in_single_precision(x, quintics):
    whole, x = x, x.float()
    q = identity = torch.eye(len(x))
    gram = x @ x.mT
    for step, (a, b, c) in enumerate(quintics):
        p = a * identity + b * gram + c * gram @ gram
        q = p @ q if step else p
        gram = p @ gram @ p if step < 4 else gram
    return q.double() @ whole


# expect: elements, more than the matrix has; make products with @
def multiplies_by_broadcasting(x, quintics):
    for a, b, c in quintics:
        gram = (x[:, None] * x).sum(-1)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


# expect: the result for rank 0's matrix of 48 x 192 is off by
def stops_after_four(x, quintics):
    q = identity = torch.eye(len(x), dtype=x.dtype)
    gram = x @ x.mT
    for a, b, c in quintics[:4]:
        p = a * identity + b * gram + c * gram @ gram
        q, gram = p @ q, p @ gram @ p
    return q @ x


# expect: rank 0's matrix of 48 x 192 took 9,953,280 operations, over the budget of 6,635,520
def three_products_a_step(x, quintics):
    for a, b, c in quintics:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
