"""The README and the pages that it leads to: commands are taken, and what they say of files and owners is so."""

import itertools
import re
from pathlib import Path

from distmuon import launch
from distmuon.models import recipe
from distmuon.verify import training

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\w*\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
DEMO = (ROOT / "book" / "demo.md").read_text(encoding="utf-8")


def test_the_page_says_rightly_why_calls_are_fractions():
    layout, muon, _ = training.plan_run(recipe.Recipe(), 4, 2)
    cut = [i for i in muon if layout.specs[i].tp_split_dim is not None]
    owned = [
        sum(layout.meta(b, i, rank).owned for b in layout.buckets for i in b.params if i in cut) for rank in range(4)
    ]
    assert owned == [1, 2, 1, 1]
    assert "DP rank 1 owns pieces of two matrices" in DEMO


def test_the_readme_is_short_and_has_a_picture_and_the_files_that_it_names():
    assert len(README.split()) <= 900
    named = re.findall(r"`((?:book|scripts|notebooks)/[\w./]*|[A-Z]+\.md|CITATION\.cff)`", README)
    named += re.findall(r"\]\((?!http)([\w./]+)", README)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_command_for_gpus_is_taken_and_fits_its_grid():
    (block,) = (block for block in BLOCKS if "torchrun" in block)
    commands = [line.split() for line in block.replace("\\\n", "").splitlines() if line.startswith("torchrun")]
    assert len(commands) == 2
    for words in commands:
        place = words.index("scripts/10_dp_tp.py")
        given = dict(itertools.pairwise(words[1:place]))
        ranks = int(given.get("--nnodes", 1)) * int(given["--nproc-per-node"])
        parser = launch.parser("")
        launch.add_arguments(parser, dp=1, tp=1)
        arguments = parser.parse_args(words[place + 1 :])
        assert (arguments.dp * arguments.tp, arguments.backend) == (ranks, "nccl")
        recipe.Recipe().check(arguments.dp, arguments.tp)


def test_every_command_of_the_gpu_page_has_the_environment_and_none_replaces_its_torch():
    page = (ROOT / "book" / "operations.md").read_text(encoding="utf-8")
    found = 0
    for block in re.findall(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        before, *after = re.split(r"^source \.venv/bin/activate$", block, maxsplit=1, flags=re.MULTILINE)
        assert not re.findall(r"^(?:\w+=\S* )*(?:srun )?(?:python|torchrun)\b.*", before, re.MULTILINE)
        found += len(re.findall(r"\b(?:python|torchrun) ", "".join(after)))
    assert found >= 8
    assert "--upgrade torch" not in page
