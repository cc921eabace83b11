"""A command for test_machines.py: two machines train, perhaps one is cut off, and one process says where they end."""

import signal
import sys
import tempfile
from pathlib import Path

from distmuon import launch
from distmuon.launch import session
from muonbook import network_emulation

APART, TOGETHER = "apart", "together"  # each machine with a network of its own, or all on this one's
HOLD = "held in the middle of a step"  # in place of what happens: until somebody kills this process


def main() -> None:
    how, *names = sys.argv[1:]
    if how == APART:
        network_emulation.setup_bridge()
    from muonbook.ch18 import checkpoint_contents, outages
    from muonbook.ch18.cluster import Cluster

    with tempfile.TemporaryDirectory(dir=session.directory()) as home:
        cluster = Cluster(Path(home) / "cluster", ranks=1, apart=how == APART)
        outages.prepare(cluster, len(names))
        with cluster:
            cluster.start()
            if names == [HOLD]:
                cluster.wait_until_held(*cluster.holds)
                print(HOLD, flush=True)
                signal.pause()
            for passed in outages.go_through(cluster, names):
                print(f"{passed.name}: {passed.seen}; {passed.lost} lost")
            print("exit codes", *cluster.wait_for_end())
        undisturbed = outages.undisturbed(cluster, Path(home) / "one machine")
        print("to the bit", checkpoint_contents.same_end(cluster.run, undisturbed))


if __name__ == "__main__":
    launch.command(main)  # type: ignore[arg-type]
