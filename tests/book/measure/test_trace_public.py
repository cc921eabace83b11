"""The public traces: fetched whole or not at all, and read with every known answer."""

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest
import worlds

from muonbook.measure import results
from muonbook.measure.trace import read
from muonbook.measure.trace_report import matched_by_name, optimizer_times, summarize
from tools import fetch_traces

FETCHED = worlds.ROOT / fetch_traces.FOLDER
# collectives, communication, sum, busy, span, overlap, optimizer on host and GPU, counted by name: ms of five steps
KNOWN = {
    "trace_muon_FULLSTEP_dp2_tp2_rank0": (10, 68.73, 68.73, 406.07, 406.98, 0.00, 4.29, 248.45, 139.53),
    "trace_adamw_FULLSTEP_rank0": (25, 115.78, 115.78, 285.67, 363.49, 0.00, 1.46, 18.74, 245.84),
    "trace_muon_FULLSTEP_dp2_tp2_async_rank0": (10, 119.39, 146.00, 365.64, 366.32, 92.66, 5.05, 221.10, 294.09),
    "trace_adamw_FULLSTEP_async_rank0": (25, 125.09, 125.09, 287.22, 358.70, 2.95, None, None, 377.44),
}
PARTS = {
    "trace_muon_FULLSTEP_dp2_tp2_rank0": [68.73, 42.76, 26.86, 0.37, 0.36, 0.23, 0.22],
    "trace_adamw_FULLSTEP_rank0": [115.78, 115.78, 11.50, 1.35, 0.89, 0.54],
}
TO_A_HUNDREDTH = 0.00501


def public(name: str) -> Path:
    path = FETCHED / f"{name}.json"
    if not path.exists():
        pytest.skip(f"{fetch_traces.FOLDER} has no public traces; `make traces` fetches them")
    return path


@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(name: str) -> None:
    (trace,) = read(public(name))
    s, optimizer, parts = summarize(trace), optimizer_times(trace), matched_by_name(trace)
    found = [s.collectives, s.communication, s.communication_sum, s.busy, s.span, s.overlap]
    found += [optimizer.host, optimizer.gpu or 0, sum(time for _, time in parts)]
    for mine, known in zip(found, KNOWN[name], strict=True):
        assert known is None or mine == pytest.approx(known, abs=TO_A_HUNDREDTH)
    if name in PARTS:
        assert [time for _, time in parts] == pytest.approx(PARTS[name], abs=TO_A_HUNDREDTH)


@pytest.mark.parametrize("name", KNOWN)
def test_the_results_file_has_the_known_answers(name: str) -> None:
    stored = results.load("report_traces")["traces"][name]
    keys = ("collectives", "communication_ms", "communication_sum_ms", "busy_ms", "span_ms", "overlap_ms",
            "optimizer_cpu_ms", "optimizer_gpu_ms", "name_matched_ms")  # fmt: skip
    for key, known in zip(keys, KNOWN[name], strict=True):
        assert known is None or stored[key] == pytest.approx(known, abs=TO_A_HUNDREDTH + 0.0005)


# Fetching


def test_fetched_whole_and_once(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in fetch_traces.SHA256:
        (source / name).write_text(name)
    monkeypatch.setattr(
        fetch_traces, "SHA256", {n: hashlib.sha256(n.encode()).hexdigest() for n in fetch_traces.SHA256}
    )
    monkeypatch.setattr(fetch_traces, "SOURCE", source.as_uri())
    monkeypatch.setattr(fetch_traces, "FOLDER", to := tmp_path / "new" / "folder")
    monkeypatch.setattr(sys, "argv", ["fetch_traces.py"])
    fetch_traces.main()
    assert {path.name for path in to.iterdir()} == set(fetch_traces.SHA256)
    assert "here already" not in capsys.readouterr().out
    fetch_traces.main()
    assert capsys.readouterr().out.count("here already, checked") == 10
