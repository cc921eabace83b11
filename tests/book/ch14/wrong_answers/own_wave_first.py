# expect: all ranks must start waves in one order


def look_ahead(link, buffers, waves, work):
    order = [(link.rank + k) % waves for k in range(waves)]
    started = link.start(order[0], buffers[0])
    for i, k in enumerate(order):
        started.wait()
        if i + 1 < waves:
            started = link.start(order[i + 1], buffers[(i + 1) % 2])
        work(k, buffers[i % 2])
