"""The conformance kit bites: every mistake is caught by the check that names it, and nothing sound is."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import broken_muons
import pytest
import torch

from muon_conformance import arithmetic, conventions, ranks
from muon_conformance.adapter import Adapter, detect, load
from muon_conformance.kit import CHECKS, FAILED, PASSED, UNCLAIMED, Observation, Subject, judge
from muon_conformance.programs import PROGRAMS
from muon_conformance.reference import MUON, tolerance

KIT = Path(__file__).resolve().parents[3] / "scripts" / "muon_conformance"
FILE = broken_muons.__file__
OURS = "muon_conformance.ours"
ROOMS = (arithmetic, conventions, ranks)  # each adds its own to the checks
ALONE = [name for name, one in CHECKS.items() if one.ranks == 1 and not name.startswith(conventions.PROGRAM)]


def examine(source: str, names: list[str]) -> dict[str, Observation]:
    subject = Subject(load(source))
    return {name: judge(CHECKS[name], subject) for name in names}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less for a rank that has gone."""
    monkeypatch.setattr(ranks, "TIMEOUT", 3.0)


# ---- Mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mistake", broken_muons.BROKEN)
def test_a_mistake_is_caught_by_the_check_that_names_it(mistake: str) -> None:
    name = broken_muons.BROKEN[mistake][1]
    (found,) = examine(f"{FILE}:{mistake.lower()}", [name]).values()
    assert found.verdict == FAILED, found.seen
    assert found.seen.endswith(".")
    assert not found.seen.startswith("raised"), found.seen


def test_without_a_mistake_nothing_is_caught() -> None:
    names = [name for _, name, _ in broken_muons.BROKEN.values() if CHECKS[name].ranks == 1]
    found = examine(f"{FILE}:sound", [*ALONE, *names])
    assert {o.check: o.seen for o in found.values() if o.verdict == FAILED} == {}
    for check in {*names} - {"flags change nothing", "AdamW for the rest"}:
        assert found[check].verdict == PASSED


def test_every_check_on_one_process_has_caught_a_mistake() -> None:
    assert {*ALONE} <= {name for _, name, _ in broken_muons.BROKEN.values()}


# ---- Sound ones -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ours", ["muon", "muonw", "distributed_muon"])
def test_ours_do_all_that_they_claim(ours: str) -> None:
    on_ranks = [name for name, one in CHECKS.items() if one.ranks == 4 and ours != "muon"]
    found = examine(f"{OURS}:{ours}", ALONE + on_ranks)
    assert {o.check: o.seen for o in found.values() if o.verdict == FAILED} == {}
    unclaimed = {o.check for o in found.values() if o.verdict == UNCLAIMED}
    assert unclaimed & {*ALONE} <= {
        "flags change nothing", "AdamW for the rest", "what is no matrix is refused", "gradients stay as they were"
    }  # fmt: skip
    claimed = load(f"{OURS}:{ours}").placements
    on_meshes = [o for o in found.values() if o.check in on_ranks and o.verdict == PASSED]
    assert len(on_meshes) == len(claimed)
    for o in on_meshes:
        assert o.numbers["distance"] == 0, o.seen


@functools.cache
def sharp(ours: str) -> Subject:
    """Return one of ours in float32 throughout, where rounding hides little: of updates, and of the weights besides."""
    adapter = load(f"{OURS}:{ours}")
    wire = {} if ours == "muon" else {"gather_dtype": torch.float32}
    make = functools.partial(adapter.make, compute_dtype=torch.float32, **wire)
    subject = Subject(dataclasses.replace(adapter, make=make, precision=torch.float32))
    subject.tolerance *= 3
    return subject


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("ours", ["muon", "muonw", "distributed_muon"])
@pytest.mark.filterwarnings("error", "ignore:Using backward.. with create_graph=True", "ignore:no parameter of this")
def test_ours_train_every_program_or_refuse_it_and_warn_of_nothing(ours: str, program: str) -> None:
    conventions.follow(program, sharp(ours))


def test_in_float32_rounding_leaves_a_millionth_and_the_kit_asks_for_no_less() -> None:
    assert 1e-6 < tolerance((MUON,) * 5, torch.float32) < 1e-3
    assert tolerance((MUON,) * 5, torch.bfloat16) < 0.2
    source = f"{FILE}:sound"
    sharp = Subject(Adapter(**vars(load(source)) | {"precision": torch.float64}))
    assert judge(CHECKS["golden numbers"], sharp).verdict == FAILED  # it computes in less


# ---- The command ------------------------------------------------------------------------------------------


def command(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Run the kit's command here, where torch is imported already; return its exit code and all that it prints."""
    code = pytest.main(["-p", "no:cacheprovider", "-p", "no:xdist", str(KIT), *words])
    return int(code), "".join(capfd.readouterr())


def test_torchs_muon_passes_where_it_claims_to_work_and_the_report_says_what_else_it_does(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    code, printed = command(capfd, "--optimizer", "torch.optim:Muon", "--report", str(file), "-k", "not 4")
    assert code == 0, printed
    installed = metadata.version("torch")  # PyPI's own calls itself 2.13.0, and its `__version__` is 2.13.0+cu130
    assert f"conformance of Muon torch {installed}" in printed
    assert f"passed       {len(PROGRAMS)} programs of torch's users" in printed
    report = json.loads(file.read_text())
    found = {o["check"]: o for o in report["checks"]}
    assert report["totals"].keys() == {PASSED, UNCLAIMED}
    assert [found[name]["verdict"] for name in ALONE].count(PASSED) == 18
    assert "epsilon of 1e-07 says so" in found["tiny gradients"]["seen"]
    assert "every rank raised RuntimeError" in found["2 ranks: FSDP2, fewer rows than ranks"]["seen"]
    assert found["2 ranks: FSDP2, rows that divide by the ranks"]["verdict"] == UNCLAIMED
    assert str(tmp_path) not in json.dumps(report)


def test_a_failure_is_told_in_one_sentence_and_why_it_matters(capfd: pytest.CaptureFixture[str]) -> None:
    code, printed = command(capfd, "--optimizer", f"{FILE}:ascends", "-k", "golden or buffer")
    assert code == 1
    assert "failed       golden numbers" in printed
    assert CHECKS["golden numbers"].why in printed
    code, printed = command(capfd, "-k", "golden")
    assert code == 4
    assert "the conformance kit needs an optimizer: add --optimizer torch.optim:Muon" in printed


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("Muon", "give package.module:Class, or file.py:adapter"),
        ("torch.optim:Moun", "torch.optim has no Moun"),
        ("no_such_package:Muon", "no_such_package cannot be imported"),
        ("nowhere.py:adapter", "cannot be imported (FileNotFoundError"),
        ("torch.optim:lr_scheduler", "give an optimizer's class, or an Adapter"),
        ("torch.optim:AdamW", "takes no lr, weight_decay and momentum; write an Adapter"),
        (f"{FILE}:PlainSteps", "wants weight_decay, momentum; write an Adapter"),
    ],
)
def test_what_is_no_optimizer_is_answered_in_a_sentence(source: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        load(source)
    assert str(error.value).endswith(".")


# ---- Detection --------------------------------------------------------------------------------------------


def test_a_signature_is_a_claim() -> None:
    torchs = detect(torch.optim.Muon)
    assert (torchs.nesterov, torchs.scale, torchs.epsilon, torchs.coefficients) == (True, "original", 1e-7, MUON)
    assert torchs.momentum_kind is None

    class Other(torch.optim.Muon):
        def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, momentum: float = 0.9) -> None:
            super().__init__(params, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw")

    other = detect(Other)
    assert (other.nesterov, other.scale, other.flags) == (None, None, [])
    subject = Subject(other)
    assert subject.nesterov
    assert subject.momentum_kind == "average"
    assert judge(CHECKS["golden numbers"], subject).verdict == PASSED
