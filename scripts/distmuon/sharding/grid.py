"""The DP x TP grid: which rank stands where, and the two process groups it belongs to.

arange(D * T).view(D, T)         row    = one TP group: the ranks that share a replica of the model
                                 column = one DP group: the ranks that hold the same TP slice
D=4, T=2:   0 1
            2 3                  neighbours in a row have neighbouring ranks, because TP talks most and should
            4 5                  stay inside one host, on the fast links
            6 7

`Grid.of` takes a world of our launcher, or what any other program has: a DeviceMesh, or a process group.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distmuon.launch import World
from distmuon.sharding.collectives import Group, backend_of
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.warning import warn_user

DIMENSIONS = ("dp", "tp")
UNSCALED_STAGES = "train pipelines in bf16, which needs no scaler"
PIPELINES = ("pp", "pipe", "pipeline", "stage", "stages", "pipeline_parallel")  # what people call that dimension


@dataclass(frozen=True)
class Grid:
    """This rank's place on the grid of D x T ranks. `Grid.of` and its like make one.

    dp, tp, world: the groups that this rank belongs to, sharing one ledger.
    device: where its tensors live.
    ledger: what this rank has sent.
    mesh: for torch's own APIs; None if alone.
    stages: of a pipeline, whose stages have a grid each: the ranks that have this rank's place in theirs.
    """

    dp: Group
    tp: Group
    world: Group
    device: torch.device
    ledger: Ledger
    mesh: DeviceMesh | None = None
    stages: Group = field(default_factory=lambda: Group("pp"))

    @classmethod
    def alone(cls, device: str = "cpu") -> Grid:
        """Return the 1 x 1 grid: every collective is skipped and no process group is needed."""
        ledger = Ledger()
        dp, tp, world = (Group(name, ledger=ledger) for name in (*DIMENSIONS, "world"))
        return cls(dp, tp, world, _with_index(device), ledger)

    @classmethod
    def of(cls, where: World | DeviceMesh | dist.ProcessGroup | Grid) -> Grid:
        """Return the grid of a world, of a mesh, or of one process group, which becomes the DP group.

        Collective: every rank of the grid must call it. A grid is returned as it is. A mesh has the dimensions "dp" and
        "tp", in either order, or one of them; if it is a part of one with pipeline stages, see `with_stages`. Raises
        TypeError for anything else, ValueError for another mesh.
        """
        if isinstance(where, Grid):
            return where
        if isinstance(where, World):
            return cls._of_world(where)
        if isinstance(where, DeviceMesh):
            _check(where)
            return cls._on(where, where.device_type)
        if isinstance(where, dist.ProcessGroup) or where is dist.GroupMember.NON_GROUP_MEMBER:
            return cls.of_groups(dp=where)
        raise TypeError(
            f"a grid is made of a World, a DeviceMesh with dimensions dp and tp, or a process group, not of {where!r}; "
            "one process alone is Grid.alone()."
        )

    @classmethod
    def of_groups(
        cls, dp: dist.ProcessGroup | None = None, tp: dist.ProcessGroup | None = None, device: str | None = None
    ) -> Grid:
        """Return the grid with this rank in column `dp` and row `tp`; None: the rank is alone there. Collective.

        device: where tensors live; "cuda" if not given and NCCL carries GPU tensors, else "cpu".
        Raises ValueError if the groups of all ranks do not make a grid.
        """
        given = {name: group for name, group in (("dp", dp), ("tp", tp)) if group is not None}
        if not given:
            raise ValueError("give a process group as dp, as tp, or one for each; one process alone is Grid.alone().")
        for name, group in given.items():
            if group is dist.GroupMember.NON_GROUP_MEMBER:
                raise ValueError(f"rank {dist.get_rank()} is in no {name} group; only members may make the grid.")
        if device is None:
            nccl = torch.cuda.is_available() and all(backend_of(group, "cuda") == "nccl" for group in given.values())
            device = "cuda" if nccl else "cpu"
        ranks = torch.tensor(_ranks(list(given.values())))  # [D, T], or one dimension of it
        mesh = DeviceMesh.from_group(
            list(given.values()), torch.device(device).type, mesh=ranks, mesh_dim_names=tuple(given)
        )
        return cls._on(mesh, device)

    def with_stages(self, group: dist.ProcessGroup) -> Grid:
        """Return this grid as that of one pipeline stage, so that all stages clip, skip and refuse a step together.

        group: of the ranks that have this rank's place in the other stages: `mesh.get_group("pp")` where the grid is
            that of `mesh["dp", "tp"]`. Each stage has an optimizer of its own, and all call `step` together.
        A parameter that two stages hold a copy of, as tied embeddings are, counts in the norm of each.
        """
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"rank {dist.get_rank()} is in no group of stages; only members may make the grid.")
        return replace(self, stages=Group.of_process_group("pp", group, self.ledger))

    def in_rank_order(self) -> Grid:
        """Return this grid with reduce-scatter adding in rank order on every backend, so that sums are reproducible.

        The same groups, ledger and bytes; on NCCL slower than its own. All-reduce stays the backend's: one result for
        all ranks, but not in rank order. It settles the gradient norm, by which clipping scales, and TP's activations:
        where bits are compared with another grid's, there must be neither.
        """
        groups = {name: replace(getattr(self, name), native_reduce_scatter=False) for name in (*DIMENSIONS, "world")}
        return replace(self, **groups)

    def refuse_one_stage(self, what: str) -> None:
        """Raise ValueError, naming `what`, if this grid is a pipeline stage's that knows nothing of the others."""
        if self.stages.size == 1:
            remedy = 'let it know the others: Grid.of(mesh["dp", "tp"]).with_stages(mesh.get_group("pp"))'
            refuse_one_stage(beyond(self.mesh), what, remedy)

    def refuse_scaler(self) -> None:
        """Raise ValueError if this is the grid of a pipeline stage, whether it knows the others or not."""
        known = ("pp",) * (self.stages.size > 1)
        refuse_one_stage(beyond(self.mesh) or known, "a GradScaler", UNSCALED_STAGES)

    def check_beyond(self, **asked: bool) -> None:
        """Refuse what is asked for, see `refuse_one_stage`; warn if this grid is but a part of a larger mesh."""
        for what, is_asked in asked.items():
            if is_asked:
                self.refuse_one_stage(what)
        outside = [name for name in beyond(self.mesh) if self.stages.size == 1 or name not in PIPELINES]
        if outside:
            warn_user(
                f"the mesh is a part of one with the dimension(s) {', '.join(outside)}, over which nothing is "
                "averaged, measured or checked here: a gradient that is not finite stops the ranks of this part alone.",
            )

    @classmethod
    def _of_world(cls, world: World) -> Grid:
        """Groups get the world's timeout: `new_group` does not inherit it."""
        if world.size == 1:
            return cls.alone(world.device)
        ranks = torch.arange(world.size).view(world.dp, world.tp)
        limit = timedelta(seconds=world.timeout)
        handles = []
        for name, lines in (("dp", ranks.T.tolist()), ("tp", ranks.tolist())):
            for line in lines:  # every rank creates every group, in the same order, or all hang
                handle = dist.new_group(line, timeout=limit, group_desc=name)
                if world.rank in line:
                    handles.append(handle)
        mesh = DeviceMesh.from_group(
            handles,
            world.device,
            mesh=ranks,
            mesh_dim_names=DIMENSIONS,
        )
        return cls._on(mesh, world.device, native=world.backend == "nccl")

    @classmethod
    def _on(cls, mesh: DeviceMesh, device: str, native: bool | None = None) -> Grid:
        assert mesh.mesh_dim_names is not None
        handles = {name: mesh.get_group(name) for name in mesh.mesh_dim_names}
        handles["world"] = everyone(mesh, list(handles.values()))
        if native is None:
            native = backend_of(handles["world"], mesh.device_type) == "nccl"
        ledger = Ledger()
        groups = {name: Group(name, ledger=ledger) for name in DIMENSIONS}
        for name, handle in handles.items():
            groups[name] = Group.of_process_group(name, handle, ledger, native)
        return cls(groups["dp"], groups["tp"], groups["world"], _with_index(device), ledger, mesh)


def _check(mesh: DeviceMesh) -> None:
    """Raise ValueError, on every rank alike where they can know, unless the mesh is a grid with this rank on it."""
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError('the mesh has no dimension names; make it with mesh_dim_names=("dp", "tp").')
    if others := [name for name in names if name not in DIMENSIONS]:
        ours = ", ".join(f'"{name}"' for name in names if name in DIMENSIONS)
        raise ValueError(
            f"the mesh has dimension(s) {', '.join(others)} besides dp and tp; "
            + (f"give its part mesh[{ours}]." if ours else "give Grid.of_groups(dp=mesh.get_group(...), tp=...).")
        )
    ranks = mesh.mesh
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not on the mesh {ranks.tolist()}; only its ranks make the grid.")
    if any((ranks.diff(dim=dim) < 0).any() for dim in range(ranks.ndim)):  # torch sorts the members of every group
        raise ValueError(f"the mesh {ranks.tolist()} lists ranks out of order; let them ascend along every dimension.")


def _ranks(groups: list[dist.ProcessGroup]) -> list[Any]:
    """Return the ranks of one group, or of the grid [D][T] of a DP and a TP group. Collective."""
    if len(groups) == 1:
        return dist.get_process_group_ranks(groups[0])
    column, row = map(dist.get_process_group_ranks, groups)
    rows: list[Any] = [None] * len(column)
    dist.all_gather_object(rows, row, groups[0])
    seen: list[Any] = [None] * len(row)
    dist.all_gather_object(seen, (column, rows), groups[1])  # what every rank of this row sees
    if seen != [(list(line), rows) for line in zip_longest(*rows)]:
        raise ValueError(
            f"the DP group {column} and the TP group {row} are no column and row of one grid; "
            "make the groups from the columns and rows of torch.arange(D * T).view(D, T)."
        )
    return rows


def everyone(mesh: DeviceMesh, handles: list[dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return the group of all ranks of the mesh: an old one if there is one, else one that only they make."""
    ranks = sorted(mesh.mesh.flatten().tolist())
    config = dist.get_backend_config(handles[0])
    known = [group for group in (dist.group.WORLD, *handles) if group and dist.get_backend_config(group) == config]
    for group in known:
        if dist.get_world_size(group) == len(ranks):
            return group
    # torch gives a new group its own timeout, half an hour, and has no public way to ask for that of an old one
    limit = known[0]._get_backend(torch.device(mesh.device_type)).options._timeout
    return dist.new_group(ranks, timeout=limit, backend=config, use_local_synchronization=True, group_desc="world")


@functools.lru_cache(maxsize=16)
def beyond(mesh: DeviceMesh | None) -> tuple[str, ...]:
    """Return the dimensions, of the mesh that this one is a part of, along which it holds one place among several.

    For mesh["dp", "tp"] of a mesh of pp, dp and tp that is pp: the other stages of a pipeline are beyond it.
    """
    root = root_of(mesh)
    if mesh is None or root is None or root.mesh_dim_names is None:
        return ()
    places = torch.isin(root.mesh, mesh.mesh.flatten()).nonzero()  # [ranks, dimensions]
    alike = (places == places[:1]).all(0).tolist()
    return tuple(
        name for name, same, size in zip(root.mesh_dim_names, alike, root.mesh.shape, strict=True) if same and size > 1
    )


def refuse_one_stage(dimensions: Iterable[str], what: str, remedy: str) -> None:
    """Raise ValueError, naming `what`, if a pipeline's stages would each decide it for themselves.

    dimensions: those `beyond` the mesh; a pipeline's is known by its name. remedy: the end of the sentence.
    """
    if stages := [name for name in dimensions if name in PIPELINES]:
        raise ValueError(
            f"{what} would see one pipeline stage alone, because the mesh is a part of one with the dimension "
            f"{stages[0]!r}: every stage would clip by a norm of its own, or skip a step that others make; {remedy}."
        )


def root_of(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the mesh from which this one was sliced. torch has moved and renamed the method, and may again."""
    for name in ("get_root_mesh", "_get_root_mesh"):
        if callable(find := getattr(mesh, name, None)):
            return find()
    return mesh


def _with_index(device: str) -> torch.device:
    """Return the device as tensors on it name it: this process's own GPU where only "cuda" is said."""
    named = torch.device(device)
    if named.type == "cuda" and named.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return named
