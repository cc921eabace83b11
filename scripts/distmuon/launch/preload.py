"""torch, as the fork server imports it, once, before it forks the first rank; of it torch._dynamo, 1 s, for optimizers.

Nothing of it is ever given back. So no garbage is looked for meanwhile, which would be a fifth of the time, and none
later among these objects: a rank that only looked at them would copy their pages.
"""

import gc

gc.disable()
try:
    import torch
    import torch._dynamo
    import torch.distributed.device_mesh  # noqa: F401
finally:
    gc.enable()
    gc.freeze()
