"""What `one_gpu.py` measures: Newton–Schulz, one step of each optimizer, the collectives. One part in one process.

python tests/gpu/gpu_parts.py numerics out/numerics.json

Without a GPU everything is small and runs on the CPU, to try this file, and no time or count means anything.
"""

from __future__ import annotations

import cProfile
import datetime
import io
import math
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.profiler import ProfilerActivity, profile

from distmuon import DistributedMuon, Grid, MuonW
from distmuon.models.networks import Transformer
from distmuon.optim import gram
from distmuon.optim import newton_schulz as ns
from distmuon.optim.coefficients import MUON
from distmuon.optim.fast_paths import fast_dtype, half_gram_pays
from distmuon.optim.param_groups import groups_for
from distmuon.sharding import collectives
from distmuon.verify.prediction import predict_transient
from muonbook import jobs

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
ACTIVITIES = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if GPU else [ProfilerActivity.CPU]

# Relative errors that each dtype may have after five steps of Newton–Schulz; the input is float32 in every case.
TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.float32: 1e-4, torch.float64: 1e-6}
SCALES = (1.0, 1e-30, 1e30)

# TFLOP/s of dense bf16 products, by the makers' data sheets (NVIDIA's SXM modules)
PEAKS = {"A100": 312.0, "H100": 989.4, "H200": 989.4, "GH200": 989.4, "B200": 2250.0}

NUMERIC_SHAPES = [(512, 2048), (3, 256, 1024), (384, 384), (1100, 300), (4096, 4096)] if GPU else []
NUMERIC_SHAPES = NUMERIC_SHAPES or [(32, 128), (3, 16, 64), (24, 24)]
LARGE = [(1024, 4096), (2048, 5632), (4096, 4096), (4096, 11008), (4096, 16384), (8192, 28672), (24, 1024, 4096)]
SHAPES: list[tuple[int, ...]] = LARGE if GPU else [(64, 256)]
MODEL: dict[str, Any] = dict(vocabulary=8192, width=1024, layers=24, heads=16, context=64)
SMALL_MODEL: dict[str, Any] = dict(vocabulary=64, width=64, layers=2, heads=4, context=16)
SENT = (torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8)  # dtypes that the engine sends
TIMED = 0.1 if GPU else 0.0  # seconds for which one thing is repeated, in each round
ROUNDS = 7 if GPU else 1


class Wrong(Exception):
    """What was found is not what it should be."""


# ---- Newton–Schulz ----------------------------------------------------------------------------------------


def numerics(found: dict[str, Any]) -> None:
    """Hold every form and dtype, at several scales, against float64 on the CPU; put a NaN beside a sound matrix."""
    found["rows"] = rows = []
    for shape in NUMERIC_SHAPES:
        m = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        # where an H200's float64 is right, as the small ones show, it may say what the largest should be
        exact = m.to(DEVICE) if m.numel() > 2**22 else m
        wanted = ns.newton_schulz(exact, compute_dtype=torch.float64, form="standard").cpu()
        for form in ("standard", "gram"):
            for dtype, tolerance in TOLERANCES.items():
                errors = {str(s): _error(m * s, wanted, form, dtype) for s in SCALES}
                right = all(error <= tolerance for error in errors.values())
                rows.append(
                    {"shape": _shape(shape), "form": form, "dtype": _name(dtype), "errors": errors, "right": right}
                )
                print(
                    *shape, form, dtype, *(f"{error:.1e}" for error in errors.values()), "right" if right else "WRONG"
                )
    two = torch.randn(2, 64, 256, device=DEVICE)
    two[0, 0, 0] = torch.nan
    spoilt = [[bool(x.isnan().any()) for x in ns.newton_schulz(two, form=form)] for form in ("standard", "gram")]
    zero = [
        bool(ns.newton_schulz(torch.zeros(64, 256, device=DEVICE), form=f).eq(0).all()) for f in ("standard", "gram")
    ]
    found["nan_stays_alone"], found["zero_stays_zero"] = spoilt == [[True, False]] * 2, all(zero)
    found["right"] = all(row["right"] for row in rows) and found["nan_stays_alone"] and found["zero_stays_zero"]
    print("a NaN stays in its matrix:", found["nan_stays_alone"], "and zero stays zero:", found["zero_stays_zero"])
    if not found["right"]:
        raise Wrong("Newton–Schulz is wrong on this device")


def _error(m: Tensor, wanted: Tensor, form: str, dtype: torch.dtype) -> float:
    result = ns.newton_schulz(m.float().to(DEVICE), form=form, compute_dtype=dtype).double().cpu()
    return float((result - wanted).norm() / wanted.norm())


def speed(found: dict[str, Any]) -> None:
    """Time all forms, torch.optim.Muon's, and the fifteen products alone; and the largest product, for the peak.

    "gram" is the centred form in bf16, "half" the one in float16, "cublas" the same without our kernel.
    """
    side = 8192 if GPU else 128
    square = torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16)
    found["largest_product_tflops"] = 2 * side**3 / milliseconds(lambda: square @ square) / 1e9
    found["peak_tflops"] = peak = next(
        (PEAKS[name] for name in sorted(PEAKS, key=len, reverse=True) if GPU and name in torch.cuda.get_device_name()),
        None,
    )
    print(f"a product of {side} x {side}: {found['largest_product_tflops']:.0f} TFLOP/s; by the data sheet {peak}")
    found["rows"] = rows = []
    for shape in SHAPES:
        a, b = shape[-2:]
        x = torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) / (a * b) ** 0.5
        half = gram.HALF_SCALE * x.to(torch.float16)
        row: dict[str, Any] = {
            "shape": _shape(shape),
            "auto": "half" if half_gram_pays(shape, [MUON] * 5, DEVICE) else "standard",
            "kernel": [gram.kernel_pays(x), gram.kernel_pays(x @ x.mT)],  # of X X^T, of squares
        }
        ways: dict[str, Callable[[], object]] = {
            "standard": partial(ns.newton_schulz_, x, form="standard", compute_dtype=torch.bfloat16),
            "gram": partial(ns.newton_schulz_, x, form="gram", compute_dtype=torch.bfloat16),
            "half": partial(ns.newton_schulz_, x, form="gram", compute_dtype=torch.float16),
            "products": partial(ns._iterate, x, [MUON] * 5),
            "half_products": partial(gram.half_gram_iterate, half, [MUON] * 5),
            "half_cublas": partial(_without_kernel, gram.half_gram_iterate, half, [MUON] * 5),
        }
        if x.ndim == 2:
            ways["torch"] = partial(_zeropower_via_newtonschulz, x, MUON, 5, 1e-7)
        for name, way in ways.items():
            row[f"{name}_ms"] = milliseconds(way)
            row[f"{name}_launches"] = profiled(way)["launches"]
        row["tflops"] = math.prod(shape[:-2]) * ns.flops((a, b)) / row["standard_ms"] / 1e9
        row["share_of_peak"] = row["tflops"] / peak if peak else None
        rows.append(row)
        print(_line(row))


def _without_kernel(iterate: Callable[..., Tensor], *arguments: Any) -> Tensor:
    with mock.patch.object(gram, "kernel_pays", return_value=False):
        return iterate(*arguments)


# ---- Optimizers -------------------------------------------------------------------------------------------


def steps(found: dict[str, Any]) -> None:
    """Take one step of each optimizer on one transformer, by the clock, under the profiler, and under the allocator."""
    found["rows"] = rows = []
    for name in (
        "DistributedMuon owner",
        "DistributedMuon gather_all",
        "MuonW",
        "torch.optim.Muon",
        "torch.optim.AdamW",
    ):
        torch.manual_seed(0)
        model = Transformer(**(MODEL if GPU else SMALL_MODEL)).to(DEVICE)
        groups = groups_for(model, "muon")
        parameters = [p for group in groups for _, p in group["params"]]
        optimizer, bound = _optimizer(name, groups)

        def give(parameters: list[nn.Parameter] = parameters, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            torch.stack([(1e-3 * p).sum() for p in parameters]).sum().backward()  # they lie as any backward leaves them

        row = {"optimizer": name, "parameters": len(parameters), "elements": sum(p.numel() for p in parameters)}
        for _ in range(2):
            give()
            optimizer.step()
        taken = [_clocked(give, optimizer) for _ in range(ROUNDS)]
        row |= {"ms": statistics.median(whole for whole, _ in taken), "host_ms": statistics.median(h for _, h in taken)}
        give()
        row["peak_bytes"], row["predicted_bytes"] = _peak(optimizer.step), bound
        give()
        row |= profiled(optimizer.step)
        rows.append(row)
        print(_line(row))
        give()
        print(*_host_time(optimizer.step), sep="\n")


def _optimizer(name: str, groups: list[dict[str, Any]]) -> tuple[Any, int | None]:
    """Return the optimizer, and what its step is predicted to allocate at most, where that is known."""
    if name.startswith("DistributedMuon"):
        strategy = name.split()[1]
        ours = DistributedMuon(groups, Grid.alone(DEVICE.type), strategy=strategy, max_norm=1.0)
        layout, dtype = ours.buffers.layout, _name(fast_dtype(DEVICE, torch.bfloat16))
        return ours, predict_transient(layout, 1, 0, list(ours.muon), strategy, compute_dtype=dtype, foreach=GPU)
    if name == "MuonW":
        return MuonW(groups), None
    matrices, others = ([p for _, p in group["params"]] for group in groups)
    if name == "torch.optim.Muon":  # takes matrices alone
        return torch.optim.Muon(matrices), None
    return torch.optim.AdamW(matrices + others, fused=GPU), None


def _clocked(give: Callable[[], None], optimizer: Any) -> tuple[float, float]:
    """Return milliseconds until a step is done, and until the host has asked for all of it."""
    give()
    synchronize()
    begin = time.perf_counter()
    optimizer.step()
    host = time.perf_counter()
    synchronize()
    return 1e3 * (time.perf_counter() - begin), 1e3 * (host - begin)


def _peak(run: Callable[[], object]) -> int | None:
    """Return what `run` allocates on the GPU beyond what is there, at its worst moment."""
    if not GPU:
        run()
        return None
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    synchronize()
    return torch.cuda.max_memory_allocated() - before


def _host_time(run: Callable[[], object]) -> Iterator[str]:
    """Yield where Python spends a step's time: the functions that take most by themselves."""
    profiler = cProfile.Profile()
    profiler.runcall(run)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(14)
    yield from (line for line in text.getvalue().splitlines()[6:] if line.strip())


# ---- Collectives ------------------------------------------------------------------------------------------


def collectives_of_one(found: dict[str, Any]) -> None:
    """Make every call of the engine's on a group of one rank, in every dtype that it sends; train FSDP2 with MuonW.

    `Group` calls nothing where a rank is alone, so that the calls are made here as it would make them. What several
    GPUs would say to each other, one cannot show.
    """
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/store"
        options: dict[str, Any] = {"device_id": DEVICE} if GPU else {}
        found["backend"] = "nccl" if GPU else "gloo"
        dist.init_process_group(found["backend"], init_method=where, rank=0, world_size=1, **options)
        try:
            limit = datetime.timedelta(seconds=40)
            group = dist.new_group([0], timeout=limit, group_desc="dp", use_local_synchronization=True)
            found["calls"] = {_name(dtype): _calls(group, dtype) for dtype in SENT}
            print(*found["calls"].items(), sep="\n")
            found["fsdp2_away"] = _fsdp2()
            print("FSDP2 with MuonW, largest difference from MuonW on plain tensors:", found["fsdp2_away"])
            dist.barrier()
        finally:
            dist.destroy_process_group()
    found["right"] = all(made == "right" for calls in found["calls"].values() for made in calls.values())
    if not found["right"] or not found["fsdp2_away"] < 1e-5:
        raise Wrong("a collective, or MuonW on FSDP2, is wrong on this device")


def _calls(group: Any, dtype: torch.dtype) -> dict[str, str]:
    """Return what came of each call: "right", or the error."""
    sent = torch.ones(8, device=DEVICE).to(dtype)
    got = torch.zeros_like(sent)
    made: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: collectives._all_gather_flat(got, sent, group=group, async_op=True).wait(),
        "all_gather of a list": lambda: dist.all_gather([got], sent, group=group),
        "reduce_scatter": lambda: collectives._reduce_scatter_flat(got, sent, group=group),
        "all_to_all": lambda: dist.all_to_all_single(got, sent, group=group),
        "all_to_all, unequal": lambda: dist.all_to_all_single(got, sent, [8], [8], group=group, async_op=True).wait(),
        "all_reduce": lambda: dist.all_reduce(got.copy_(sent), group=group),
        "all_reduce, maximum": lambda: dist.all_reduce(got.copy_(sent), dist.ReduceOp.MAX, group=group),
        "broadcast": lambda: dist.broadcast(got.copy_(sent), group_src=0, group=group),
    }
    outcomes = {}
    for name, call in made.items():
        got.zero_()
        try:
            call()
            outcomes[name] = "right" if got.eq(1).all() else f"wrong: {got.tolist()}"
        except (RuntimeError, TypeError, ValueError) as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
    return outcomes


def _fsdp2() -> float:
    """Return how far MuonW, clipping included, takes a sharded net from where it takes a plain one."""
    ends = []
    for sharded in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64)).to(DEVICE)
        if sharded:
            fully_shard(net, mesh=init_device_mesh(DEVICE.type, (1,), mesh_dim_names=("dp",)))
        optimizer = MuonW(net)
        for step in range(3):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(DEVICE)
            net(x).square().mean().backward()
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        ends.append([(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in net.parameters()])
    return max(float((one - other).abs().max()) for one, other in zip(*ends, strict=True))


# ---- Clocks and counters ----------------------------------------------------------------------------------


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def milliseconds(run: Callable[[], object]) -> float:
    """Return how long `run` takes when it is repeated: the median of some rounds."""
    for _ in range(ROUNDS):
        run()
    synchronize()
    begin = time.perf_counter()
    run()
    synchronize()
    times = max(1, min(200, int(TIMED / (time.perf_counter() - begin))))
    rounds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(times):
            run()
        synchronize()
        rounds.append(1e3 * (time.perf_counter() - begin) / times)
    return statistics.median(rounds)


COUNTED = {  # what the profiler calls it -> what it is
    "launches": ("cudaLaunchKernel", "cuLaunchKernel"),
    "waits": ("cudaStreamSynchronize", "cudaEventSynchronize"),
    "copies_to_gpu": ("Memcpy HtoD",),
    "copies_to_host": ("Memcpy DtoH",),
    "copies_within_gpu": ("Memcpy DtoD",),
}


def profiled(run: Callable[[], object]) -> dict[str, Any]:
    """Return how many kernels `run` launches, how often it waits for the GPU and copies, and how long the GPU works."""
    synchronize()
    with profile(activities=ACTIVITIES, acc_events=True) as profiler:
        run()
        synchronize()
    events = profiler.key_averages()
    found: dict[str, Any] = {
        what: sum(event.count for event in events if event.key.startswith(names)) for what, names in COUNTED.items()
    }
    on_gpu = sum(
        event.self_device_time_total
        for event in events
        if event.device_type != torch.autograd.DeviceType.CPU and not event.is_user_annotation  # it spans kernels
    )
    return found | {"gpu_busy_ms": on_gpu / 1e3}


def _line(row: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
    )


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


PARTS = {"numerics": numerics, "speed": speed, "steps": steps, "collectives": collectives_of_one}


def main(name: str, path: str) -> int:
    """Run one part, and write what it found, as far as it came."""
    found: dict[str, Any] = {}
    try:
        PARTS[name](found)
    except Wrong as wrong:
        print(f"WRONG: {wrong}")
        return 1
    finally:
        jobs.write_json(path, found)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
