# expect: with 1 wave(s), work(0) was never called


def look_ahead(link, buffers, waves, work):
    started = link.start(0, buffers[0])
    for k in range(waves - 1):
        started.wait()
        started = link.start(k + 1, buffers[(k + 1) % 2])
        work(k, buffers[k % 2])
    started.wait()
