"""Other implementations of Muon, where they are: in a folder of clones, or installed. Nothing here fetches any.

They are used as they come. What is set is what they let anyone set, to the benefit of their time: see `four_ranks`.
Needs no torch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Peer(NamedTuple):
    """Where an implementation is from: its repository on GitHub, whose name is its folder's; what one imports."""

    repository: str
    module: str


PEERS = {"dion": Peer("microsoft/dion", "dion"), "keller_jordan": Peer("KellerJordan/Muon", "muon")}


def find(folder: str | None) -> dict[str, dict[str, Any]]:
    """Return name -> {"here": True, "version": ...}, or {"here": False, "remedy": a sentence}."""
    found: dict[str, dict[str, Any]] = {}
    for name, peer in PEERS.items():
        make_importable([name], folder)
        spec = importlib.util.find_spec(peer.module)
        if spec is None or spec.origin is None:
            where = "a folder, and name that folder: PEERS=FOLDER"
            found[name] = {"here": False, "remedy": f"not here; clone github.com/{peer.repository} into {where}."}
        else:
            found[name] = {"here": True, "repository": peer.repository, "version": version(peer, Path(spec.origin))}
    return found


def make_importable(names: Iterable[str], folder: str | None) -> None:
    """Let the peers in `folder` be imported in this process."""
    for name in names:
        place = None if folder is None else Path(folder) / PEERS[name].repository.partition("/")[2]
        if place is not None and place.is_dir() and str(place) not in sys.path:
            sys.path.append(str(place))


def version(peer: Peer, origin: Path) -> str:
    """Return the commit of the clone that a module is in, or the version that is installed."""
    folder = next((folder for folder in origin.parents if (folder / ".git").exists()), None)
    if folder is not None and "site-packages" not in origin.parts:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True)
        if done.returncode == 0:
            return f"commit {done.stdout.strip()}"
    try:
        return importlib.metadata.version(peer.module)
    except importlib.metadata.PackageNotFoundError:
        return "unknown: not a clone, and not installed"
