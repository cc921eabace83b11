"""On real worlds: clipping, scalers, DDP, and ranks that do not hold the same thing."""

from checks import on_every_rank

test_the_contract = on_every_rank("contract_checks", dp=2, tp=2)
