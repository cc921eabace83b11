"""Two machines train; one loses its power before the reader's eyes, then a cable is pulled; and training goes on."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

from distmuon.extras.checkpoint import runs
from distmuon.launch import WorldError, session
from muonbook import jobs
from muonbook.ch18 import checkpoint_contents, outages
from muonbook.ch18.cluster import Cluster

AFTERWARDS = {  # what happens -> what the reader sees next
    "a machine loses its power": "b is switched on again",
    "a cable is pulled": "the cable is put back",
}


def report(obstacle: str | None) -> Generator[str]:
    """Yield the lines of the story as it happens. obstacle: why the machines have no networks of their own, if so.

    Raises WorldError where the end is not that of one machine.
    """
    with tempfile.TemporaryDirectory(prefix="story-", dir=session.directory()) as home:
        cluster = Cluster(Path(home) / "cluster", ranks=1, apart=obstacle is None)
        outages.prepare(cluster, len(AFTERWARDS))
        yield from _beginning(cluster, obstacle)
        alone = outages.undisturbed(cluster, Path(home) / "one machine")
        with cluster:
            cluster.start()
            for passed in outages.go_through(cluster, list(AFTERWARDS)):
                yield from _happened(passed)
            codes = cluster.wait_for_end()
        yield f"step {cluster.steps}   finished: both loops end, with exit code {' and '.join(map(str, codes))}"
        yield ""
        if set(codes) != {0} or not checkpoint_contents.same_end(cluster.run, alone):
            raise WorldError("two machines did not end where one does.", None)
        ranks = len(cluster.machines) * cluster.ranks
        yield f"The last checkpoint is that of {ranks} ranks on one machine to which nothing happened, bit for bit."


def _beginning(cluster: Cluster, obstacle: str | None) -> Iterator[str]:
    ranks, last = jobs.plural(cluster.ranks, "rank"), runs.at_step("RUN", cluster.steps)
    yield f"Two machines, a and b, of {ranks} each; {cluster.steps} steps, a checkpoint every {cluster.every}."
    if obstacle is None:
        yield f"{jobs.HERE}each has a network, a name and processes of its own, and a cable to the switch."
    else:
        yield f"{jobs.HERE}both share one network, and b is stopped (SIGSTOP) where it has to fall silent: {obstacle}"
    yield "On both runs the same:"
    yield f"  python scripts/keep_going.py --until {last} -- \\"
    yield f"    torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.ranks} --max-restarts 0 \\"
    yield "    --rdzv-backend c10d --rdzv-endpoint a:29500 scripts/train.py \\"
    yield f"    --timeout {cluster.timeout:g} --folder RUN"
    yield ""


def _happened(passed: outages.Passed) -> Iterator[str]:
    from_step = passed.step - 1 - passed.lost
    yield f"step {passed.step}   {passed.outage.done.split(',')[0]}"
    yield f"          a rank of {passed.outage.notices} says: {re.sub(r' [0-9]+ms', '', passed.seen)}"
    yield f"          the loops start torchrun again; {AFTERWARDS[passed.name]}"
    yield f"step {from_step}   gone on from the checkpoint: {passed.lost} steps are made again"
