"""Metrics: on every grid and mesh the numbers of one process, which are those of singular values and plain sums."""

from __future__ import annotations

import io
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import metrics_workers as work
import pytest
import torch
from helpers_math import message
from mesh_cases import WRAPS
from metrics_workers import Record
from once import once
from torch import nn

from distmuon import Muon, MuonW, launch
from distmuon.extras.metrics.matrix import orthogonality
from distmuon.metrics import Console, JsonLines, Metrics, TensorBoard
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.sharding import hooks
from distmuon.sharding.grid import Grid

NORMS = ("totals", "groups", "parameters", "samples")
EQUAL_WAYS = [way for way in work.WAYS if way != "blockwise"]


@once
def one_process() -> dict[str, Any]:
    return launch.run(work.alone)[0]


@once
def two_by_two() -> tuple[list[dict[str, Any]], list[Record]]:
    """What the ranks of the grid have found, and the lines of the one file that they were all given."""
    with tempfile.TemporaryDirectory() as folder:
        found = launch.run(work.on_shards, (tuple(work.WAYS), folder), dp=2, tp=2)
        return found, lines(Path(folder, "all.jsonl"))


@once
def three_by_one() -> list[dict[str, Any]]:
    return launch.run(work.on_shards, (("gather_all", "owner"),), dp=3)


@once
def meshes() -> list[dict[str, Any]]:
    return launch.run(work.on_meshes, dp=4)


def lines(path: Path) -> list[Record]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def same(found: Any, wanted: Any, rel: float) -> bool:
    """Say whether two records are alike; numbers that are next to nothing count as nothing."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key], rel) for key in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(lambda a, b: same(a, b, rel), found, wanted))
    return found == (pytest.approx(wanted, rel=rel, abs=rel) if isinstance(wanted, float) else wanted)


def norms(record: Record, *names: str) -> Record:
    return {name: record[name] for name in names or NORMS}


def said(kind: type[Exception], act: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(kind) as error:
        act(*arguments, **options)
    return message(error)


# ---- The same numbers everywhere --------------------------------------------------------------------------


@pytest.mark.parametrize("way", EQUAL_WAYS)
def test_a_grid_observes_what_one_process_does(way: str) -> None:
    for mine, wanted in zip(two_by_two()[0][0][way], one_process()[way], strict=True):
        assert same(norms(mine), norms(wanted), 1e-12 if "float64" in way else 1e-6)
        assert len(mine["samples"]) > 80 if "every" in way else len(mine["samples"]) == work.SOME * (way != "adamw")


@pytest.mark.parametrize("way", ["gather_all", "owner"])
def test_so_does_one_that_divides_nothing_evenly(way: str) -> None:
    for mine, wanted in zip(three_by_one()[0][way], one_process()[way], strict=True):
        assert same(norms(mine), norms(wanted), 1e-6)


def test_strategies_that_make_muon_are_told_from_the_one_that_does_not() -> None:
    blocks, muon = two_by_two()[0][0]["blockwise"], one_process()["owner"]
    assert same(blocks[0]["samples"]["experts[0]"], muon[0]["samples"]["experts[0]"], 1e-6)  # TP cuts between those
    assert blocks[1]["samples"]["cut experts[1]"]["cosine"] < muon[1]["samples"]["cut experts[1]"]["cosine"] - 0.01


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_are_those_of_singular_values_and_plain_sums(dtype: str) -> None:
    for record in meshes()[0][f"plain {dtype}"]:
        of_matrices, of_parameters = record["expected"]
        assert same(record["samples"], of_matrices, 1e-6 if dtype == "float32" else 1e-9)
        assert same(record["parameters"], of_parameters, 1e-6 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_mesh_observes_what_one_process_does(wrap: str) -> None:
    for mine, wanted in zip(meshes()[0][wrap], meshes()[0]["plain float32"], strict=True):
        assert same(norms(mine), norms(wanted), 1e-6)


def test_totals_are_made_of_parameters() -> None:
    first, second = one_process()["gather_all, float64, every matrix"]
    assert (first["step"], second["step"], first["skipped"]) == (1, 2, False)
    assert first["parameters"][work.ABSENT]["gradient_norm"] > 0
    absent = second["parameters"][work.ABSENT]
    assert (absent["gradient_norm"], absent["update_rms"]) == (None, None)
    assert work.ABSENT not in second["samples"]
    squares = [numbers["gradient_norm"] or 0.0 for numbers in second["parameters"].values()]
    assert second["totals"]["gradient_norm"] == pytest.approx(math.hypot(*squares), rel=1e-12)
    squares = [numbers["gradient_norm"] or 0.0 for numbers in second["groups"]]
    assert second["totals"]["gradient_norm"] == pytest.approx(math.hypot(*squares), rel=1e-12)


def test_gradients_are_measured_before_clipping() -> None:
    clipped, free = (one_process()[way][0]["totals"] for way in ("gather_cut, clipped", "gather_all"))
    assert clipped["gradient_norm"] == free["gradient_norm"] > 1
    assert clipped["momentum_norm"] < 0.5 < free["momentum_norm"]


def test_all_ranks_know_the_same_but_samples() -> None:
    for ranks in (two_by_two()[0], three_by_one()):
        first, *others = [rank["gather_all"][1] for rank in ranks]
        for other in others:
            assert norms(other, *NORMS[:3]) == norms(first, *NORMS[:3])
            assert other["samples"] == {}
            assert (other["seconds"], other["sent_bytes"]) == (first["seconds"], first["sent_bytes"])


def test_shares_and_bytes_of_a_step() -> None:
    for way in EQUAL_WAYS:
        ranks = [rank[way][0] for rank in two_by_two()[0]]
        assert ranks[0]["sent_bytes"] == sum(rank["told"] for rank in ranks) / 4 > 0
        assert 0 < ranks[0]["communication"] < 1
        assert (0 < ranks[0]["newton_schulz"] < 1) == (way != "adamw")
        assert ranks[0]["communication"] + ranks[0]["newton_schulz"] < 1
        alone = one_process()[way][0]
        assert alone["sent_bytes"] == 0


# ---- Ranks that differ ------------------------------------------------------------------------------------


def test_ranks_that_ask_for_different_things_all_say_so() -> None:
    ranks = [rank["words"] for rank in two_by_two()[0]]
    assert ranks == [ranks[0]] * 4
    every, reduction, wrong, folder = ranks[0]
    assert "'every' is 3 on rank 1, and 2 on rank 0" in every
    assert "'max'" in reduction
    assert "every is 0; give a whole number, 1 or more" in wrong
    assert "IsADirectoryError" in folder


def test_scalars_of_many_ranks_become_one() -> None:
    found, written = two_by_two()
    wanted = {"loss": 1.5 + 3, "tokens": 1 + 3, "logit": -5.0, "rare": 7.0, "never": None, "of others": None}
    for rank in found:
        broken = rank["scalars"]["scalars"].pop("broken")
        assert math.isnan(broken)
        assert rank["scalars"]["scalars"] == wanted
    assert [record["step"] for record in written] == [6, 8]
    assert written[1]["scalars"] == wanted | {"broken": "NaN"}


def test_after_bad_days_it_goes_on() -> None:
    skipped, after, refused, later = two_by_two()[0][0]["bad days"]
    assert (skipped["step"], skipped["skipped"], skipped["totals"]["update_rms"]) == (1, True, None)
    assert math.isnan(skipped["totals"]["gradient_norm"])
    assert (after["step"], after["skipped"]) == (2, False)
    assert after["totals"]["update_rms"] > 0
    assert refused == {"hooks": 1}  # of the step that raised; the next one has taken it away
    assert norms(later, *NORMS[:3]) == norms(after, *NORMS[:3])
    assert two_by_two()[0][0]["hooks left"] == 0


def test_plain_tensors_are_observed_by_each_rank_for_itself() -> None:
    found = [rank["plain tensors"] for rank in meshes()]
    wanted = [math.sqrt(6) * (rank + 1) for rank in range(4)]
    assert [one["totals"]["gradient_norm"] for one in found] == pytest.approx(wanted, rel=1e-6)
    assert [len(one["samples"]) for one in found] == [1, 0, 0, 0]  # and only rank 0 writes


# ---- What people do ---------------------------------------------------------------------------------------


def layer(out: int = 4, in_: int = 3) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(in_, out, bias=False)


def go(optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p) + p.detach() if p.requires_grad else None
        optimizer.step()


def test_other_steps_are_left_alone() -> None:
    optimizer = MuonW(layer())
    metrics = Metrics(optimizer, every=3, start=4)
    go(optimizer)
    assert (metrics.step, metrics.latest, metrics._underway) == (5, {}, None)
    go(optimizer, 2)
    assert metrics.latest["step"] == 6
    metrics.close()
    go(optimizer, 2)
    assert (metrics.step, metrics.latest["step"], hooks._around_kinds) == (7, 6, [])
    metrics.close()


def test_samples_take_turns_also_after_a_resumption() -> None:
    def sampled(start: int, steps: int) -> list[str]:
        model = nn.Sequential(layer(), layer(5, 4), layer(2, 5), layer(3, 2))
        optimizer = MuonW(model)
        metrics, found = Metrics(optimizer, every=1, samples=2, start=start), []
        for _ in range(steps):
            go(optimizer)
            found += metrics.latest["samples"]
        return found

    assert sampled(0, 3) == ["0.weight", "1.weight", "2.weight", "0.weight", "1.weight", "2.weight"]
    assert sampled(1, 2) == sampled(0, 3)[2:]


def test_an_update_of_no_learning_rate_is_not_measured() -> None:
    optimizer = Muon(layer().parameters(), lr=torch.tensor(0.0))
    metrics = Metrics(optimizer, every=1)
    go(optimizer)
    assert (metrics.latest["totals"]["update_rms"], metrics.latest["samples"]) == (None, {})
    assert metrics.latest["totals"]["momentum_norm"] > 0
    optimizer.param_groups[0]["lr"] = 0.1
    go(optimizer)
    assert metrics.latest["totals"]["update_rms"] == pytest.approx(0.2, rel=0.3)
    assert set(metrics.latest["samples"]) == {"group0.0"}


def test_a_step_that_a_grad_scaler_lets_muonw_skip_has_no_update() -> None:
    optimizer: Any = MuonW(layer())
    metrics = Metrics(optimizer, every=1)
    optimizer.found_inf = torch.tensor(1.0)  # the scaler's, for the length of a step
    go(optimizer)
    assert (metrics.latest["skipped"], metrics.latest["totals"]["update_rms"]) == (True, None)
    del optimizer.found_inf
    go(optimizer)
    assert not metrics.latest["skipped"]


def test_closures_frozen_parameters_and_later_groups() -> None:
    model = nn.Sequential(layer(), layer(5, 4))
    frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)
    optimizer = MuonW([{"params": [model[0].weight, frozen]}], lr=0.1)
    metrics = Metrics(optimizer, every=1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    assert list(metrics.latest["parameters"]) == ["group0.0", "group0.1"]
    assert metrics.latest["parameters"]["group0.0"]["update_rms"] > 0
    assert metrics.latest["parameters"]["group0.1"]["update_rms"] is None
    assert metrics.latest["parameters"]["group0.1"]["weight_rms"] == 1
    optimizer.add_param_group({"params": [model[1].weight], "algorithm": "adamw", "lr": 0.5})
    optimizer.step(closure)
    assert metrics.latest["groups"][1]["algorithm"] == "adamw"
    assert metrics.latest["groups"][1]["update_rms"] == pytest.approx(1, rel=1e-3)  # AdamW's first


def test_what_somebody_wrote_between_steps_is_no_update() -> None:
    model = layer().bfloat16()
    optimizer = DistributedMuon([{"params": [("weight", model.weight)]}], Grid.alone(), lr=0.01)
    metrics = Metrics(optimizer, every=1)
    go(optimizer)
    before = metrics.latest["totals"]["update_rms"]
    with torch.no_grad():
        model.weight.mul_(3)
    go(optimizer)
    assert metrics.latest["totals"]["update_rms"] == pytest.approx(before, rel=0.3)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Muon])
def test_torchs_own_optimizers_are_observed_as_far_as_they_go(make: Any) -> None:
    model = layer()
    optimizer = make(model.parameters(), lr=0.1, weight_decay=0.2)
    metrics, before = Metrics(optimizer, every=1), model.weight.detach().clone()
    go(optimizer)
    moved = (0.98 * before - model.weight.detach()) / 0.1
    assert metrics.latest["totals"]["update_rms"] == pytest.approx(moved.square().mean().sqrt().item(), rel=1e-6)
    assert metrics.latest["samples"] == {}


@pytest.mark.parametrize("kind", ["Muon", "MuonW", "DistributedMuon"])
def test_a_training_that_is_observed_is_the_training_that_is_not(kind: str) -> None:
    def train(observe: bool) -> list[torch.Tensor]:
        model = layer()
        optimizer: torch.optim.Optimizer
        if kind == "DistributedMuon":
            optimizer = DistributedMuon([{"params": [("weight", model.weight)]}], Grid.alone(), lr=0.01)
        else:
            optimizer = MuonW(model) if kind == "MuonW" else Muon([model.weight], lr=0.01)
        metrics = Metrics(optimizer, every=1, samples=2) if observe else None
        for _ in range(3):
            go(optimizer)
        assert metrics is None or metrics.latest["samples"]
        return [model.weight.detach(), *(s["momentum_buffer"] for s in optimizer.state.values())]

    assert all(map(torch.equal, train(True), train(False)))


def test_what_cannot_be_watched_is_refused_in_a_sentence() -> None:
    model = layer()
    assert "Metrics cannot watch a SGD" in said(TypeError, Metrics, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = MuonW(model)
    assert "every is 2.5" in said(ValueError, Metrics, optimizer, 2.5)
    assert "samples is -1" in said(ValueError, Metrics, optimizer, samples=-1)
    assert "choose one of max, sum, mean" in said(ValueError, Metrics, optimizer, scalars={"loss": "median"})
    metrics = Metrics(optimizer, scalars={"loss": "mean"})
    assert "scalar(s) los were not announced (loss were)" in said(ValueError, metrics.record, los=1.0)
    assert "shape (2,)" in said(ValueError, metrics.record, loss=torch.ones(2))
    for take in (metrics.record, metrics.log):
        assert "scalar 'loss' is 'little'; give a number" in said(TypeError, take, loss="little")
    assert "scalar 'loss' is a tensor of 2 elements" in said(ValueError, metrics.log, loss=torch.ones(2))
    assert "scalars is ['loss']; give names" in said(TypeError, Metrics, optimizer, scalars=["loss"])
    for to in (None, "run.jsonl", [None]):
        assert f"to is {to!r}; give writers in a list" in said(TypeError, Metrics, optimizer, to=to)


def test_a_recorded_tensor_may_be_written_to_afterwards() -> None:
    optimizer, loss = MuonW(layer()), torch.tensor(2.5)
    metrics = Metrics(optimizer, every=1, scalars={"loss": "mean"})
    metrics.record(loss=loss)
    loss.zero_()
    go(optimizer)
    assert metrics.latest["scalars"] == {"loss": 2.5}
    go(optimizer)
    assert metrics.latest["scalars"] == {"loss": None}  # not last step's


def test_a_matrix_that_is_not_finite_or_has_no_full_rank() -> None:
    torch.manual_seed(0)
    o, m = torch.randn(3, 5), torch.randn(3, 5)
    assert math.isnan(orthogonality(o, m * torch.inf)["cosine"])
    m[2] = m[1]
    u, _, v = torch.linalg.svd(m.double(), full_matrices=False)
    polar = u[:, :2] @ v[:2]
    wanted = (o * polar).sum() / o.double().norm() / math.sqrt(2)
    assert orthogonality(o, m)["cosine"] == pytest.approx(wanted.item(), rel=1e-6)
    exact = orthogonality(polar, m)
    assert exact["cosine"] == pytest.approx(1, rel=1e-6)
    assert exact["singular_values"][-1] == pytest.approx(1, rel=1e-6)
    assert orthogonality(o.T, m.T)["cosine"] == pytest.approx(wanted.item(), rel=1e-6)


# ---- Writers ----------------------------------------------------------------------------------------------


def observe(writer: Any, steps: int = 1, start: int = 0, loss: float = 2.0) -> Record:
    optimizer = MuonW(layer())
    with Metrics(optimizer, every=1, to=[writer], start=start, scalars={"loss": "mean"}) as metrics:
        for _ in range(steps):
            metrics.record(loss=loss)
            go(optimizer)
    return metrics.latest


def test_a_resumed_run_goes_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    observe(JsonLines(path), steps=2)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:100])  # killed while it wrote a third
    observe(JsonLines(path), start=2)
    assert path.read_bytes().startswith(whole)
    assert [record["step"] for record in lines(path)] == [1, 2, 3]
    path.write_bytes(whole[:5])
    observe(JsonLines(path))
    assert [record["step"] for record in lines(path)] == [1]


@pytest.mark.parametrize("held", ["notes", '{"step": 1}\nnotes'])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, held: str) -> None:
    path = tmp_path / "notes"
    path.write_text(held)
    assert "holds something else than observations" in said(ValueError, observe, JsonLines(path))
    assert path.read_text() == held


def test_every_record_is_a_whole_line_at_once_and_what_is_logged_after_a_step_has_its_own(tmp_path: Path) -> None:
    path, optimizer, stream = tmp_path / "new" / "run.jsonl", MuonW(layer()), io.StringIO()
    to: list[Any] = [JsonLines(path), Console(stream)]
    with Metrics(optimizer, every=2, to=to, start=4, scalars={"loss": "mean"}) as metrics:
        for loss in (2.0, -math.inf):
            metrics.record(loss=loss)
            go(optimizer)
            metrics.log(held_out_loss=2.5)
        logged, observed, again = lines(path)  # before anybody has closed it
    assert (logged["step"], observed["step"], again["step"]) == (5, 6, 6)
    assert logged.keys() == again.keys() == {"step", "time", "scalars"}
    assert observed["scalars"] == {"loss": "-Infinity"}
    assert observed["samples"] == metrics.latest["samples"]
    said = stream.getvalue().splitlines()
    assert (said[0], said[2]) == ("step 5: held_out_loss 2.5", "step 6: held_out_loss 2.5")
    for word in ("step 6: update rms 0.", "loss -inf;", "weight: orthogonality error", "% Newton–Schulz, 0 bytes sent"):
        assert word in said[1]


def test_a_writer_that_fails_is_dropped_and_training_goes_on() -> None:
    class Full(Console):
        def write(self, record: Any) -> None:
            raise OSError(28, "No space left on device")

    with pytest.warns(UserWarning, match=r"Full is dropped \(.*No space left on device\); training goes on"):
        assert observe(Full(), steps=2)["step"] == 2


def test_tensorboard_gets_every_number_under_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, module = mock.Mock(), mock.Mock()
    module.SummaryWriter.return_value = writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    record = observe(TensorBoard(tmp_path), start=6)
    module.SummaryWriter.assert_called_once_with(str(tmp_path), purge_step=7)
    written = {call.args[0]: call.args[1:] for call in writer.add_scalar.call_args_list}
    assert written["totals/update_rms"] == (record["totals"]["update_rms"], 7)
    assert written["samples/weight/singular_values/4"] == (record["samples"]["weight"]["singular_values"][4], 7)
    assert written["scalars/loss"] == (2.0, 7)
    assert "step" not in written
    assert [call[0] for call in writer.method_calls[-2:]] == ["flush", "close"]


def test_without_tensorboard_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert "run `pip install tensorboard`, or write JsonLines" in said(ModuleNotFoundError, TensorBoard, "runs/a")
