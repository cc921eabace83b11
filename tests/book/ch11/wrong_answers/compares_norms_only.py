# expect: in a healthy update the largest lies between about 0.7 and 1.2.


def alarm(update):
    rms = update.square().mean().sqrt()
    return bool(not 0.1 < rms < 0.4)
