"""A command for test_machines.py: some machines train, perhaps one is cut off, and one process says where they end."""

import sys
import tempfile
from pathlib import Path

from distmuon import launch
from distmuon.launch import hosts, session


def main() -> None:
    machines, *names = sys.argv[1:]
    hosts.become_switch()
    from muonbook.ch18 import contents, outages
    from muonbook.ch18.cluster import Cluster

    with tempfile.TemporaryDirectory(dir=session.directory()) as home:
        cluster = Cluster(Path(home) / "cluster", machines=int(machines), ranks=6 // int(machines))
        outages.prepare(cluster, len(names))
        with cluster:
            cluster.start()
            for passed in outages.go_through(cluster, names):
                print(f"{passed.name}: {passed.seen}; {passed.lost} lost")
            print("exit codes", *cluster.wait_for_end())
        print("to the bit", contents.same_end(cluster.run, outages.undisturbed(cluster, Path(home) / "one machine")))


if __name__ == "__main__":
    launch.command(main)  # type: ignore[arg-type]
