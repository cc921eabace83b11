"""A grid in any world: of meshes and process groups that another program has made, and in one that torchrun started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import grid_workers as work
import optimizer_cases as cases
import pytest
import torch
import worlds
from once import once

from distmuon import launch
from distmuon.sharding.grid import Grid

RANKS = torch.arange(work.RANKS)
GRIDS = {  # the ranks as they should stand, [grids, D, T]
    "mesh": RANKS.view(1, 4, 2),
    "tp first": RANKS.view(1, 2, 4).mT,
    "dp alone": RANKS.view(1, 8, 1),
    "tp alone": RANKS.view(2, 1, 4),
    "part of a mesh": RANKS.view(2, 2, 2),
    "scattered part": RANKS.view(2, 2, 2).movedim(1, 0),
    "groups": RANKS.view(1, 2, 4),
    "one group": RANKS.view(1, 8, 1),
}
REFUSALS = {
    "other names": r"ValueError: the mesh has dimension\(s\) replicas, model besides dp and tp; give Grid.of_groups\(",
    "one more dimension": r'ValueError: the mesh has dimension\(s\) pp besides dp and tp; give its part mesh\["tp"\]\.',
    "no names": r"ValueError: the mesh has no dimension names; make it with mesh_dim_names=",
    "descending": r"ValueError: the mesh \[\[1, 0\], .*\]\] lists ranks out of order; let them ascend",
    "rank outside the mesh": r"ValueError: rank [4-7] is not on the mesh \[0, 1, 2, 3\]; only its ranks",
    "rank outside the group": r"ValueError: rank [2-7] is in no dp group; only members",
    "one group twice": r"ValueError: the DP group \[.*\] and the TP group \[.*\] are no column and row of one grid;",
    "no group": r"ValueError: give a process group as dp, as tp, or one for each;",
    "a number": r"TypeError: a grid is made of a World, a DeviceMesh .*, or a process group, not of 8; ",
    "nothing": r"TypeError: a grid is made of .* not of None; one process alone is Grid\.alone\(\)\.",
}
ADMITTED = {"rank outside the mesh": range(4), "rank outside the group": range(2)}  # the others are told


@once
def facts() -> list[dict[str, Any]]:
    return launch.run(work.facts, dp=work.RANKS, timeout=work.TIMEOUT)


@pytest.mark.parametrize("form", GRIDS)
def test_every_rank_stands_where_the_mesh_has_put_it(form: str) -> None:
    for rank, found in enumerate(facts()):
        (number, dp, tp), place = (GRIDS[form] == rank).nonzero()[0].tolist(), found["places"][form]
        grid = GRIDS[form][number]
        for name, members in (("dp", grid[:, tp]), ("tp", grid[dp]), ("world", grid.flatten().sort().values)):
            assert place[name] == (len(members), members.tolist().index(rank), members.tolist()), (rank, name)
        assert place["one ledger"]
        assert place["device"] == torch.device("cpu")


@pytest.mark.parametrize("form", work.TRAINED)
def test_what_it_trains_is_what_one_process_trains_to_the_bit(form: str) -> None:
    for rank, found in enumerate(facts()):
        _, _, tp_rank = (GRIDS[form] == rank).nonzero()[0].tolist()
        for weight in work.CASE.weights:
            mine = cases.cut(found["wanted"][form][weight.name], weight.dim, GRIDS[form].shape[2], tp_rank)
            assert torch.equal(found["trained"][form][weight.name], mine), (rank, weight.name)


def test_a_part_of_a_larger_mesh_waits_as_long_as_the_program_does() -> None:
    for form in ("part of a mesh", "scattered part"):
        assert {found["places"][form]["timeout"] for found in facts()} == {work.timeout()}


@pytest.mark.parametrize("form", REFUSALS)
def test_what_is_no_grid_is_refused_in_one_sentence(form: str) -> None:
    for rank, found in enumerate(facts()):
        told = found["refusals"][form]
        if rank in ADMITTED.get(form, ()):
            assert told is None
        else:
            assert re.match(REFUSALS[form], told), told


def test_a_grid_is_itself() -> None:
    grid = Grid.alone()
    assert Grid.of(grid) is grid
    assert grid.dp.ledger is grid.tp.ledger is grid.world.ledger is grid.ledger


def test_in_rank_order_sums_are_taken_one_rank_after_the_other() -> None:
    for found in launch.run(work.in_rank_order, dp=4):
        assert found["total"] == [1.0, 1.0]  # ((1e8 + 1) - 1e8) + 1 in float32; another order gives 0 or 2
        assert found["same ledger"]
        assert all(found["same groups"])
        assert found["native"] == [True, False]


OPERATIONS = (worlds.ROOT / "book" / "operations.md").read_text(encoding="utf-8")


def test_the_pages_program_of_ones_own_trains_under_torchrun(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", OPERATIONS, re.DOTALL | re.MULTILINE)
    assert "init_device_mesh" in program
    assert "launch" not in program
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    given = os.environ | {"PYTHONPATH": str(worlds.ROOT / "scripts"), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True)
    found = re.fullmatch(r"loss ([\d.]+) -> ([\d.]+)\n", done.stdout)
    assert found is not None, done
    assert done.returncode == 0, done
    assert float(found[2]) < 0.5 * float(found[1])
