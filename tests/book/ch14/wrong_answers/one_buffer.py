# expect: wave 1 was started into the buffer of wave 0, which work has not read yet


def look_ahead(link, buffers, waves, work):
    started = link.start(0, buffers[0])
    for k in range(waves):
        started.wait()
        if k + 1 < waves:
            started = link.start(k + 1, buffers[0])
        work(k, buffers[0])
