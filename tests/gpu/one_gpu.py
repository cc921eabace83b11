"""Try the engine on one GPU, in less than eight minutes, with nothing installed besides torch and pytest.

python tests/gpu/one_gpu.py out/gpu                   # all parts, riskiest first: what `make gpu` calls
python tests/gpu/one_gpu.py out/gpu numerics speed    # some of them

Each part is a process of its own with a limit of its own, so that one that hangs or dies takes nothing with it. The
folder gets `gpu.json`, rewritten after every part, and `gpu.txt`, what all of them said. Where torch sees no GPU, this
is a dry run on the CPU, with small shapes, and the files are called `dry_run`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SECONDS = 470  # for all parts together


class Part(NamedTuple):
    """What one process does: the script, the seconds that it may take, the threads that each of its processes has."""

    script: str
    limit: int
    threads: int


PARTS = {
    "numerics": Part("gpu_parts.py", 60, 4),
    "speed": Part("gpu_parts.py", 110, 4),
    "steps": Part("gpu_parts.py", 80, 4),
    "collectives": Part("gpu_parts.py", 60, 4),
    "tests": Part("run_on_gpus.py", 330, 1),
}


def take(name: str, seconds: float, threads: int, folder: Path) -> tuple[dict[str, Any], Any, str]:
    """Run a part; return how it ended, what it found as far as it came, and what it said."""
    found, said = folder / f"{name}.json", folder / f"{name}.txt"
    settings = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", "KINETO_LOG_LEVEL": "99"}
    begin = time.monotonic()
    with said.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, str(HERE / PARTS[name].script), name, str(found)],
            cwd=ROOT,
            env=os.environ | settings,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=seconds)
            ended = "well" if code == 0 else f"with exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"at its limit of {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = said.read_text(encoding="utf-8", errors="replace")
    outcome = {"ended": ended, "seconds": round(time.monotonic() - begin, 1)}
    return outcome, json.loads(found.read_text(encoding="utf-8")) if found.exists() else None, text


def circumstances() -> dict[str, Any]:
    """Return what the results depend on: machine, commit, GPUs, their driver, CUDA's and NCCL's versions."""
    import torch

    from muonbook.measure import results

    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, IndexError, subprocess.CalledProcessError):
        driver = None
    return results.made_by() | {
        "command": "make gpu",
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "driver": driver,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        "date": datetime.date.today().isoformat(),
    }


def main() -> int:
    """Return 0 if every part ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the results go")
    parser.add_argument("--commit", help="of this tree, where it was copied here and its history does not know it")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.parts if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}.")
    sys.path.insert(0, str(ROOT / "scripts"))
    found = circumstances() | ({"commit": arguments.commit} if arguments.commit else {})
    stem = "gpu" if found["gpus"] else "dry_run"
    arguments.folder.mkdir(parents=True, exist_ok=True)
    results, said = (arguments.folder / f"{stem}.{kind}" for kind in ("json", "txt"))
    from muonbook import jobs

    parts: dict[str, Any] = {}
    deadline = time.monotonic() + SECONDS
    with tempfile.TemporaryDirectory() as folder, said.open("w", encoding="utf-8") as file:
        for name in arguments.parts or PARTS:
            seconds = min(PARTS[name].limit, deadline - time.monotonic())
            if seconds <= 0:
                parts[name] = {"ended": "before it began: the time for all parts was over", "seconds": 0.0}
                text = ""
            else:
                threads = PARTS[name].threads if found["gpus"] else 1
                parts[name], found[name], text = take(name, seconds, threads, Path(folder))
            heading = f"== {name}: ended {parts[name]['ended']}, after {parts[name]['seconds']} s"
            for out in (file, sys.stdout):
                print(heading, text, sep="\n", file=out, flush=True)
            jobs.write_json(str(results), found | {"parts": parts})
    print(f"Written to {results} and {said}")
    return int(any(part["ended"] != "well" for part in parts.values()))


if __name__ == "__main__":
    sys.exit(main())
