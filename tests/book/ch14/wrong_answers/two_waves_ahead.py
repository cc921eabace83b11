# expect: wave 2 was started into the buffer of wave 0, which is still being filled


def look_ahead(link, buffers, waves, work):
    started = [link.start(k, buffers[k % 2]) for k in range(waves)]
    for k in range(waves):
        started[k].wait()
        work(k, buffers[k % 2])
