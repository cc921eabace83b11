"""What joins ranks in a cluster, as assumptions: alpha and bandwidth by class of link.

    +--------- node of 8 ---------+            +--------- node of 8 ---------+
    |  rank = rank = rank = rank  | == node == |  rank = rank = rank = rank  |     =  inside: NVLink or PCIe
    +-----------------------------+            +-----------------------------+     == between: InfiniBand or Ethernet

Ranks stand as on the grid of `grid`: a TP group is a run of neighbours, a DP group takes every T-th. A group within a
node has the inside link. A ring over several nodes enters and leaves each of them once, so the groups that pass through
one node at the same moment share what joins it to the others: with T <= 8 they are T DP groups. Summed over them, the
bytes that leave a node for DP do not depend on T, however much each rank's own share shrinks.

An exchange, in which ranks send straight to each other, has no such order: with T = 1 all eight ranks of a node send
to every rank outside it, so the node's way out carries up to eight times what it carries for a ring.

Bandwidths are the makers' peaks; nobody reaches them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from muonbook.planner.cost_model import TP_EXCHANGE, LinkCost

NODE = 8  # ranks

NVLINK = LinkCost(3.4e-6, 450e9)
PCIE = LinkCost(5.7e-6, 31.5e9)
ADAPTER = LinkCost(9.6e-6, 50e9)  # InfiniBand, one
INFINIBAND = LinkCost(ADAPTER.alpha_seconds, NODE * ADAPTER.bytes_per_second)  # a node's
ETHERNET = LinkCost(9.6e-6, 12.5e9)  # a node's
PEAK_FLOPS = 989e12  # per second
SUSTAINED = 0.4  # of the peak, in matrix products of the model and of Newton–Schulz alike
SOURCES = {
    "latency": "NVIDIA/nccl, src/graph/tuning.cc (commit 01afd20), hwLat, Ring, Simple: NVLink 3.4, PCI 5.7, network "
    "9.6 microseconds per hop; TCP over Ethernet takes longer",
    "nvlink": "NVIDIA, Introducing NVIDIA HGX H100 (2022): 900 GB/s, both ways together",
    "pcie": "PCI-SIG, PCI Express Base Specification 4.0: 16 GT/s on each of 16 lanes, 128 bits of 130",
    "infiniband": "NVIDIA, DGX H100 datasheet: eight adapters of 400 Gb/s per node",
    "ethernet": "IEEE 802.3ba: one adapter of 100 Gb/s per node",
    "peak_flops": "NVIDIA, H100 SXM datasheet: 1,979e12 bf16 per second with sparsity, half of it dense; 80 GB",
    "sustained": "assumed",
}


@dataclass(frozen=True)
class Fabric:
    """A cluster: `inside` is one rank's link, `between` one node's, and what a rank computes per second.

    node: ranks per node; 1 where every rank has a link of its own and no neighbours.
    """

    title: str
    inside: LinkCost
    between: LinkCost
    node: int = NODE
    flops_per_second: float = PEAK_FLOPS * SUSTAINED

    def links(self, dp: int, tp: int, stride: int | None = None) -> dict[str, LinkCost]:
        """Return the links of each group on a dp x tp grid: of rings in "dp", "tp" and "world"; of exchanges over TP
        in `TP_EXCHANGE`, and among all ranks in "mesh".

        stride: between neighbours in a DP group, if it is not T.
        """
        sizes = {"dp": (dp, stride or tp), "tp": (tp, 1)}
        rings = {name: self.ring(*each) for name, each in sizes.items()}
        exchanges = {TP_EXCHANGE: self.exchange(tp, 1), "mesh": self.exchange(dp * tp, 1)}
        return rings | exchanges | {"world": self.ring(dp * tp, 1)}

    def exchange(self, size: int, stride: int) -> LinkCost:
        """Return the link of an all-to-all in a group of `size` ranks, `stride` apart, while all ranks exchange.

        What a rank sends to others of its node stays inside. The rest leaves it, and all ranks of a node share the way.
        """
        together = max(1, min(size, self.node // stride))
        if together >= size:
            return self.inside
        outside = size - together
        hops = (together - 1) * self.inside.alpha_seconds + outside * self.between.alpha_seconds
        rate = self.between.bytes_per_second / self.node * (size - 1) / outside
        return LinkCost(hops / (size - 1), min(rate, self.inside.bytes_per_second) if together > 1 else rate)

    def ring(self, size: int, stride: int) -> LinkCost:
        """Return the link of a ring of `size` ranks, `stride` apart, while all groups like it send."""
        together = max(1, min(size, self.node // stride))  # of its ranks in one node
        nodes = -(-size // together)
        if nodes == 1:
            return self.inside
        hops = (size - nodes) * self.inside.alpha_seconds + (nodes - 1) * self.between.alpha_seconds
        share = self.between.bytes_per_second / min(stride, self.node)
        return LinkCost(hops / (size - 1), min(share, self.inside.bytes_per_second) if together > 1 else share)


FABRICS: dict[str, Fabric] = {
    "nvlink_infiniband": Fabric("NVLink, InfiniBand", NVLINK, INFINIBAND),
    "nvlink_ethernet": Fabric("NVLink, Ethernet", NVLINK, ETHERNET),
    "pcie_ethernet": Fabric("PCIe, Ethernet", PCIE, ETHERNET),
    "one_wire": Fabric("one wire for all", ADAPTER, ADAPTER, node=1),
}


class Device(NamedTuple):
    """What computes: bytes of memory, and operations per second at its peak, dense, in bf16."""

    title: str
    memory_bytes: float
    peak_flops: float


DEVICES: dict[str, Device] = {
    "a100": Device("A100 80 GB", 80e9, 312e12),  # NVIDIA, A100 datasheet
    "h100": Device("H100 80 GB", 80e9, PEAK_FLOPS),  # NVIDIA, H100 SXM datasheet
    "h200": Device("H200 141 GB", 141e9, PEAK_FLOPS),  # NVIDIA, H200 datasheet
}
