"""On GPUs: every worker's jobs, and the engine in a program of one's own. Where there is none, these tests are skipped.

`make gpu` runs them and stores what came of it.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import gpu_jobs
import gpu_workers
import pytest
import torch
import worlds

from distmuon import launch
from distmuon.optim import gram
from distmuon.optim.newton_schulz import _iterate, newton_schulz
from tools import ns_coefficients

MINUTES = 5  # for one command: ranks are spawned, and each makes a CUDA context
DEVICE = torch.device("cuda", 0)
needs_a_gpu = pytest.mark.skipif(gpu_jobs.GPUS < 1, reason="needs a GPU, and torch sees none here.")


def test_every_job_that_takes_a_device_is_tried() -> None:
    tried = {(job.worker, job.job) for job in gpu_jobs.JOBS}
    assert gpu_jobs.takers() == tried | gpu_jobs.ELSEWHERE
    assert not tried & gpu_jobs.ELSEWHERE
    assert len({run.name for run in gpu_jobs.runs()}) == len(gpu_jobs.runs())


@pytest.mark.skipif(gpu_jobs.GPUS > 0, reason="there is a GPU here, so the commands themselves are run.")
def test_where_there_is_no_gpu_nothing_else_is_wrong_with_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(worlds.ROOT)
    for run in gpu_jobs.runs():
        monkeypatch.setattr(sys, "argv", run.words)
        worker = importlib.import_module(Path(run.words[0]).stem)
        with pytest.raises(launch.UsageError, match=r"on GPUs needs CUDA, and torch sees no GPU here"):
            worker.main()


@pytest.mark.timeout(60 * MINUTES + 30)
@pytest.mark.parametrize("run", gpu_jobs.runs(), ids=lambda run: run.name)
def test_a_worker_ends_well(run: gpu_jobs.Run) -> None:
    if run.gpus > gpu_jobs.GPUS:
        pytest.skip(f"needs {run.gpus} GPU{'s' * (run.gpus > 1)}, and torch sees {gpu_jobs.GPUS or 'none'} here.")
    done = subprocess.run(
        [sys.executable, *run.words], cwd=worlds.ROOT, capture_output=True, text=True, timeout=60 * MINUTES
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@needs_a_gpu
@pytest.mark.timeout(60 * MINUTES + 30)
@pytest.mark.parametrize("grid", [("1", "1"), ("2", "1"), ("2", "2")], ids="x".join)
def test_the_one_page_equals_one_process(grid: tuple[str, str]) -> None:
    dp, tp = grid
    if int(dp) * int(tp) > gpu_jobs.GPUS:
        pytest.skip(f"needs {int(dp) * int(tp)} GPUs, and torch sees {gpu_jobs.GPUS} here.")
    words = [sys.executable, "scripts/00_one_page.py", "--backend", "nccl", "--dp", dp, "--tp", tp]
    done = subprocess.run(words, cwd=worlds.ROOT, capture_output=True, text=True, timeout=60 * MINUTES)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@needs_a_gpu
@pytest.mark.parametrize(("backend", "ranks"), [("nccl", 1), ("gloo", 2)])
def test_a_mesh_of_gpus_trains_as_our_world_does(backend: str, ranks: int) -> None:
    for found in launch.run(gpu_workers.train_twice, dp=ranks, backend=backend, device="cuda"):
        assert found["equal"]
        assert found["moved"]
        assert found["at home"]
        assert found["native"] == (backend == "nccl")
        assert found["precision"] == "highest"


@needs_a_gpu
def test_torch_still_gathers_no_dtensor_of_a_gpu_over_gloo() -> None:
    """Where it does, chapter 17's count need not refuse any more."""
    with pytest.raises(launch.WorldError):
        launch.run(gpu_workers.gather_a_dtensor, dp=2, backend="gloo", device="cuda", timeout=30)


@pytest.mark.skipif(gpu_jobs.GPUS < 4, reason="needs 4 GPUs: the order of a sum shows from the third rank on.")
def test_nccl_adds_in_rank_order_when_it_is_told_to() -> None:
    for found in launch.run(gpu_workers.add_in_rank_order, dp=4, backend="nccl"):
        assert found == [1.0, 1.0]  # ((1e8 + 1) - 1e8) + 1 in float32


@needs_a_gpu
def test_a_gpu_orthogonalizes_as_the_processor_does() -> None:
    matrix = torch.randn(3, 48, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    here, there = (
        newton_schulz(matrix, compute_dtype=torch.float64),
        newton_schulz(matrix.cuda(), compute_dtype=torch.float64),
    )
    assert there.device.type == "cuda"
    torch.testing.assert_close(there.cpu(), here, rtol=0, atol=1e-10)


@needs_a_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(128, 64), (40, 72), (3, 264, 520), (1000, 1000), (2, 512, 2048)], ids=str)
def test_the_kernel_s_product_is_symmetric_to_the_bit_and_right(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not gram.has_kernel(DEVICE):
        pytest.skip("this GPU is none of those that the kernel is for.")
    from distmuon.optim.symmetric_kernel import symmetric_product

    draw = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=draw).to(DEVICE, dtype)
    also = torch.randn(*shape[:-1], shape[-2], generator=draw).to(DEVICE, dtype)
    also = also + also.mT
    for addend, keep in ((None, 0.0), (also, -1.5)):
        found = symmetric_product(x, x.mT, addend, 0.25, keep)
        wanted = 0.25 * x.double() @ x.double().mT + (0 if addend is None else keep * addend.double())
        assert torch.equal(found, found.mT)
        worst = (found.double() - wanted).abs().max() / wanted.abs().max()
        assert worst < torch.finfo(dtype).eps, float(worst)
    square = symmetric_product(x, x.mT, None, 1 / shape[-1], 0.0)
    found, wanted = symmetric_product(square, square, square, 1.0, 1.0), square.double() @ square.double() + square
    assert (found.double() - wanted).abs().max() < torch.finfo(dtype).eps * wanted.abs().max()


@needs_a_gpu
def test_the_kernel_keeps_a_nan_in_its_matrix() -> None:
    if not gram.has_kernel(DEVICE):
        pytest.skip("this GPU is none of those that the kernel is for.")
    m = torch.randn(16, 1024, 4096, device=DEVICE)
    m[3, 5, 7] = torch.nan
    found = newton_schulz(m)
    assert gram.kernel_pays(m)
    assert [bool(x.isnan().any()) for x in found] == [number == 3 for number in range(16)]
    assert torch.equal(found[4], newton_schulz(m.nan_to_num())[4])


@needs_a_gpu
@pytest.mark.parametrize("kernel", [True, False])
def test_in_float16_the_gram_form_is_safe_on_every_spectrum(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel and not gram.has_kernel(DEVICE):
        pytest.skip("this GPU is none of those that the kernel is for.")
    monkeypatch.setattr(gram, "kernel_pays", lambda left: kernel)
    monkeypatch.setattr(ns_coefficients, "forms", lambda: ON_A_GPU)
    for row in ns_coefficients.judged(ns_coefficients.errors((512, 1024), (768, 768))):
        assert not row["fails"], row


ON_A_GPU = {
    "standard, bf16": lambda x, quintics: _iterate(x.to(DEVICE, torch.bfloat16), quintics).cpu(),
    "Gram, fp16": lambda x, quintics: gram.half_gram_iterate((gram.HALF_SCALE * x.to(DEVICE)).half(), quintics).cpu(),
}
