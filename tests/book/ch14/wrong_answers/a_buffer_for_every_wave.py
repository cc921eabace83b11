# expect: a tensor that is not one of the two buffers
import torch


def look_ahead(link, buffers, waves, work):
    places = [torch.empty_like(buffers[0]) for _ in range(waves)]
    started = [link.start(k, places[k]) for k in range(waves)]
    for k in range(waves):
        started[k].wait()
        work(k, places[k])
