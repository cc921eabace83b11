"""Hold ours, torch's and others' Muons against what they claim, each in a process of its own.

Others are tried where they are: installed beside torch (pip install --no-deps ...), or cloned from
github.com/KellerJordan/Muon and github.com/microsoft/dion into a folder that PEERS names. Those that are not here are
named.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muonbook import peers
from muonbook.ch17.kit.peer_muons import EXAMINED, ExaminedMuon
from muonbook.measure import results

KIT = "scripts/muon_conformance"
LIMIT = 600.0  # seconds for one Muon: a minute where nothing else runs, many where much does


def measure(quick: bool) -> dict[str, Any]:
    """Return {"muons": name -> the kit's report, or {"missing": a sentence}}. quick: without users' programs."""
    folder, found = os.environ.get("PEERS"), dict[str, Any]()
    for name, muon in EXAMINED.items():
        version = version_of(muon, folder)
        if version is None:
            where = f"github.com/{peers.PEERS[muon.clone].repository}" if muon.clone else muon.package
            found[name] = {"missing": f"{where} was not here."}
        else:
            print(f"{name} ({version or 'of this commit'})", flush=True)
            found[name] = examined(muon, folder, ["-k", "not program"] if quick else []) | {"version": version}
    return {"muons": found}


def version_of(muon: ExaminedMuon, folder: str | None) -> str | None:
    """Return the version of what is here, "" for ours, None where it is not here."""
    if muon.clone:
        peer = peers.PEERS[muon.clone]
        place = Path(folder or "/nowhere", peer.repository.partition("/")[2])
        return f"git {peers.version(peer, place / 'setup.py').removeprefix('commit ')[:12]}" if place.is_dir() else None
    if not muon.package:
        return ""
    try:
        return f"{muon.package} {importlib.metadata.version(muon.package)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def examined(muon: ExaminedMuon, folder: str | None, options: Sequence[str]) -> dict[str, Any]:
    """Return the kit's report of one Muon, or {"broken": its last words} where the kit came to no end.

    What a Muon would compile runs as it is written: on a CPU, compiling it takes longer than all checks.
    """
    environment = {**os.environ, "PYTHONPATH": str(results.ROOT / "scripts"), "TORCHDYNAMO_DISABLE": "1"}
    environment |= {"OMP_NUM_THREADS": "1"} | ({} if folder is None else {"PEERS": str(Path(folder).resolve())})
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--optimizer", muon.source]
        try:
            done = subprocess.run(
                [*command, "--report", str(report), KIT, *options],
                cwd=results.ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"broken": f"it had not come to an end after {LIMIT:.0f} s."}
        if report.exists():
            found = json.loads(report.read_text(encoding="utf-8"))
            stopped = [one["seen"] for one in found["checks"] if one["seen"].startswith("it cannot run here")]
            return {"broken": stopped[0]} if stopped else found
        return {"broken": (done.stderr or done.stdout).strip().splitlines()[-1]}
