"""Print what seven ways to cut cost Muon on 64 ranks, for a model of your choice: the bill of the page on seven cuts.

python scripts/tools cut_prices
python scripts/tools cut_prices --model llama3_70b
"""

from __future__ import annotations

import math

from distmuon import launch
from muonbook.planner.model_shapes import find_shape
from muonbook.planner.planned_worlds import BUCKET_RULES
from tools.pages import prices


def main() -> None:
    parser = launch.parser(__doc__)
    parser.add_argument("--model", metavar="NAME", default="moonlight", help="a published shape, or a .toml file")
    name = parser.parse_args().model
    model = find_shape(name)
    if not model.permits(prices.WAYS):
        raise launch.UsageError(f"--model {name}: its heads cannot be cut over {prices.WAYS} ranks; choose another.")
    specs, muon = model.specs(1)
    elements = sum(math.prod(specs[index].shape) for index in muon)
    sizes = [f"{BUCKET_RULES['megatron'](dp):,} over {dp}" for dp in (prices.WORLD, prices.WORLD // prices.WAYS)]
    print(f"{model.title}: {len(muon):,} matrices for Muon, with {elements:,} elements together.")
    print(f"Elements in a bucket, and the DP ranks that share it: {', '.join(sizes)}.\n")
    print(prices.markdown(model), end="")
