# expect: rank 0's matrix of 48 x 192 took 9,953,280 operations, over the budget of 6,635,520


def orthogonalize(x, schedule):
    for a, b, c in schedule:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
