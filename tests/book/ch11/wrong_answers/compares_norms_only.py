# expect: it stays silent


def alarm(update):
    rms = update.square().mean().sqrt()
    return bool(not 0.1 < rms < 0.4)
