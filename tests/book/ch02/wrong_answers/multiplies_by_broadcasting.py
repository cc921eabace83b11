# expect: elements, more than the matrix has; make products with @


def orthogonalize(x, schedule):
    for a, b, c in schedule:
        gram = (x[:, None] * x).sum(-1)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
