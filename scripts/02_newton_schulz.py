"""Chapter 2: count the products of Newton–Schulz, and compare their time with what the processor can do at most.

python scripts/02_newton_schulz.py --shape 256x64
python scripts/02_newton_schulz.py --svd
python scripts/02_newton_schulz.py --share --threads 2
"""

from functools import partial
from statistics import median

from distmuon import launch
from muonbook import puzzles
from muonbook.ch02 import puzzle as fewer_flops

SVD_SIZE, SIDE, SHARE_SHAPES, SMALL, MANY = 512, 1024, ((512, 512), (512, 2048)), (64, 128), 32

# torch is imported inside the functions: a wrong argument is answered at once.


def products(call):
    """Return (rows, inner, columns) of every matrix product that torch makes during `call()`, in order."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"):
                left, right = args[-2:]
                seen.append((left.shape[-2], left.shape[-1], right.shape[-1]))
            return func(*args, **(kwargs or {}))

    seen: list[tuple[int, int, int]] = []
    with Products():
        call()
    return seen


def count(world, shape):
    """Return the products made for one matrix of `shape`, and those that it would take without transposing."""
    import torch

    from distmuon.optim import newton_schulz as ns

    x = torch.ones(shape, device=world.device)
    made = products(lambda: ns.newton_schulz(x, compute_dtype=torch.float32))
    return made, products(lambda: ns._iterate(x, ns.quintics("muon", 5)))


def ratio(world, rounds, first, second):
    """Return seconds of `first()` / seconds of `second()`, the median of `rounds` pairs taken in turn."""
    import time

    import torch

    def seconds(call):
        began = time.perf_counter()
        call()
        if world.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    pairs = [(seconds(first), seconds(second)) for _ in range(rounds + 1)]
    return median(one / other for one, other in pairs[1:])  # the first pair warms up


def against_svd(world, rounds):
    """Return how many times as long as Newton–Schulz a singular value decomposition takes."""
    import torch

    from distmuon.optim.newton_schulz import newton_schulz

    x = torch.randn(SVD_SIZE, SVD_SIZE, generator=torch.Generator().manual_seed(0)).to(world.device)
    return ratio(world, rounds, lambda: torch.linalg.svd(x), lambda: newton_schulz(x))


def shares(world, rounds):
    """Return the dtype, per shape two shares of a limit, and how many times as long a loop takes as one batch.

    The first share is the time of the fifteen products alone, over the time of Newton–Schulz. The second is its rate,
    in operations per second, over the rate of a loop of big square products. All compute in the same dtype.
    """
    import torch

    from distmuon.optim import newton_schulz as ns

    dtype = ns.fast_dtype(torch.device(world.device), torch.float32)
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(world.device)

    def bare(x, gram):
        for _ in range(5):
            x @ x.mT, gram @ gram, gram @ x

    def squares(times=4):
        for _ in range(times):
            square @ square

    square, found = random(SIDE, SIDE).to(dtype), {}
    for shape in SHARE_SHAPES:
        matrix, gram = random(*shape), random(shape[0], shape[0]).to(dtype)
        x, whole = matrix.to(dtype), partial(ns.newton_schulz, matrix, compute_dtype=dtype)
        limit = ratio(world, rounds, partial(bare, x, gram), whole)
        found[shape] = limit, ratio(world, rounds, squares, whole) * ns.flops(shape) / (4 * 2 * SIDE**3)
    small = random(MANY, *SMALL)
    loop = ratio(world, rounds, lambda: [ns.newton_schulz(one) for one in small], lambda: ns.newton_schulz(small))
    return str(dtype).removeprefix("torch."), found, loop


def shape_of(text):
    """Return (rows, columns) of text like 256x64."""
    sides = text.lower().split("x")
    if len(sides) != 2 or not all(side.isdecimal() and 0 < int(side) <= 4096 for side in sides):
        raise launch.UsageError(f"--shape {text}: write rows x columns, each from 1 to 4096, as in 256x64.")
    return int(sides[0]), int(sides[1])


def parse():
    parser = launch.parser(__doc__)
    parser.add_argument("--shape", default="256x64", help="of the matrix to count for (default: %(default)s)")
    parser.add_argument("--svd", action="store_true", help="compare the time with a singular value decomposition")
    parser.add_argument("--share", action="store_true", help="compare the time with bare products")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="pairs to time (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: %(default)s)")
    parser.add_argument("--device", default="cpu", metavar=launch.choices(("cpu", "cuda")), help="where to run")
    puzzles.add_arguments(parser)
    return parser.parse_args()


def show_count(shape, made, untransposed):
    """Print the products of the first iteration, and the operations of all."""
    print(f"{f'{shape[0]} x {shape[1]}, first iteration':30s}{'operations':>16s}")
    for n, k, m in made[:3]:
        print(f"  {f'[{n}, {k}] @ [{k}, {m}]':28s}{2 * n * k * m:16,}")
    total, other = (sum(2 * n * k * m for n, k, m in seen) for seen in (made, untransposed))
    print(f"{f'all {len(made)} products':30s}{total:16,}")
    if shape[0] > shape[1]:
        print(f"{'had it not been transposed':30s}{other:16,}   ({other / total:.2f} times)")


def main():
    arguments = parse()
    if (code := puzzles.handle(arguments, fewer_flops.PUZZLE)) is not None:
        return code
    if not 1 <= arguments.rounds <= 1000:
        raise launch.UsageError(f"--rounds {arguments.rounds}: must be from 1 to 1000.")
    options = {"device": arguments.device, "threads": arguments.threads}
    if arguments.svd:
        times = launch.run(against_svd, (arguments.rounds,), **options)[0]
        print(f"a {SVD_SIZE} x {SVD_SIZE} matrix: an SVD takes {times:.1f} times as long as Newton–Schulz")
    if arguments.share:
        dtype, found, loop = launch.run(shares, (arguments.rounds,), **options)[0]
        print(f"The speed of Newton–Schulz in {dtype}, as a share of that of")
        print(f"            its fifteen products alone   {SIDE} x {SIDE} products")
        for (a, b), (bare, square) in found.items():
            print(f"{a} x {b}".ljust(12) + f"{bare:19.0%}{square:25.0%}")
        print(f"{MANY} matrices of {SMALL[0]} x {SMALL[1]}: one by one, {loop:.1f} times as long as at once")
    if not arguments.svd and not arguments.share:
        shape = shape_of(arguments.shape)
        show_count(shape, *launch.run(count, (shape,), **options)[0])
    return 0


if __name__ == "__main__":
    launch.command(main)
