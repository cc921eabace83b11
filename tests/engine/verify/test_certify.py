"""`certify` holds for anybody's model and optimizer, fails in the row that can see a mistake, and refuses aloud."""

from __future__ import annotations

import re
from typing import Any

import certify_workers as work
import pytest
from once import once

from distmuon import Grid, certify, launch

ROWS = {"exact", "float64", "replicas", "bytes"}  # and those beside a control
WRONG = {  # the rows that must fail; what the coarse float32 row sees is luck
    "wrong scale": {"exact", "float64", "unrounded"},
    "stale rank": {"exact", "float64", "unrounded", "replicas"},
    "talkative": {"bytes"},
    "one owner": {"exact", "float64", "unrounded"},
    "wrong rate": {"exact", "float64", "unrounded"},
}
REFUSED = {
    "dropout": r"two forward passes of one batch give the losses \S+ and \S+; take dropout .* or call eval\(\)",
    "statistics": r"a forward pass changes the buffer '1\.running_mean', .* put such modules into eval\(\)",
    "unseeded": r"make_model gives '0\.weight' other values when it is called again; draw them from torch's own",
    "sum": r"the loss of a batch is \S+, and the mean over its 2 micro-batches is \S+; let loss\(model, batch\) return",
    "many": r"loss\(model, batch\) returns \(8, 5, 11\); let it return one number",
    "no loss": r"a batch is a Tensor, and without a loss it has to be a pair of inputs and targets; give loss=",
    "rows": r"batch 0 has 8 rows, for 2 DP ranks with 3 micro-batches each; give tensors .* with a multiple of 6 rows",
    "none": r"micro_batches is 0; give a whole number, 1 or more\.",
    "text": r"steps is '2'; give a whole number, 1 or more\.",
    "a model": r"make_model is a Tied; give a function, which is called for every row\.",
    "an optimizer": r"make_optimizer is a SGD; give a function, which is called for every row\.",
    "steps": r"steps is 4, and there are 3 batches; give 1 step or more, and a batch for each\.",
    "dtype": r"dtype is torch\.float16; give one of torch\.float32, torch\.bfloat16, torch\.float64\.",
    "stranger": r"make_optimizer returns RMSprop, .* give make_reference\(model\)",
    "several": r"make_optimizer returns list, .* give make_reference\(model\)",
    "another model": r"the optimizer trains a parameter of \(11, 16\) that is not in the model .* of that model\.",
    "no gather_dtype": r"make_optimizer takes no gather_dtype, .* and give that to the optimizer\.",
    "no masters": r"MuonW rounds these bfloat16 parameters in every step, .* pass master_weights=True",
    "ranks": r"the inputs of rank 1 differ from those of rank 0: 'batch 0' is .*; seed what they are drawn from",
}


@once
def on_two_ranks() -> list[dict[tuple[str, str], Any]]:
    return launch.run(work.work, ({"SOUND": list(work.SOUND), "WRONG": list(WRONG), "REFUSED": list(REFUSED)},), dp=2)


@once
def on_four_ranks() -> dict[tuple[str, str], Any]:
    return launch.run(work.work, ({"OVER_TP": list(work.OVER_TP)},), dp=2, tp=2)[0]


@pytest.mark.parametrize("name", work.SOUND)
def test_the_sharded_run_of_anybodys_model_is_the_single_process_run(name: str) -> None:
    found, elsewhere = (rank["SOUND", name] for rank in on_two_ranks())
    assert elsewhere is None
    assert found.verdicts["exact"], found.page
    assert False not in {found.verdicts[row] for row in found.verdicts if row not in ("float32", "bfloat16")}
    if name not in ("Zero1AdamW", "torch's AdamW"):
        assert found.verdicts["unrounded"], found.page
    assert found.verdicts.keys() >= ROWS
    predicted = name not in ("FSDP2", "FSDP2, bf16", "DDP", "torch's AdamW")
    assert found.verdicts["bytes"] is (True if predicted else None)
    assert ("on the same gradients" if predicted else "on the same reduced gradients") in found.page
    assert re.search(r"^  (reduce_scatter|all_to_all) +\w+ +\d", found.page, re.MULTILINE) or name == "torch's AdamW"


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_fails_the_rows_that_can_see_it(name: str) -> None:
    found = on_two_ranks()[0]["WRONG", name]
    assert {row for row, passed in found.verdicts.items() if passed is False} - {"float32"} == WRONG[name], found.page
    assert not found.passed
    assert "FAIL" in found.page
    assert found.page.endswith("NOT verified: see FAIL above.")


@pytest.mark.parametrize("name", work.OVER_TP)
def test_it_holds_over_tensor_parallelism(name: str) -> None:
    found = on_four_ranks()["OVER_TP", name]
    failed = {row for row, passed in found.verdicts.items() if passed is False} - {"float32"}
    assert failed == ({"muon"} if name == "blockwise" else set()), found.page
    assert found.verdicts["bytes"] is (None if name == "FSDP2" else True)


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_input_is_one_sentence_on_all_ranks(name: str) -> None:
    sentence, elsewhere = (rank["REFUSED", name] for rank in on_two_ranks())
    assert sentence == elsewhere
    assert re.match(REFUSED[name], sentence)
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_one_process_is_its_own_reference(one_thread: None) -> None:
    judged = certify(work.Tied, work.BATCHES, work.muon(), Grid.alone())
    assert judged is not None
    assert judged.passed
    assert judged.float64_relative_difference == 0
    assert "none: one process has nobody to send to" in str(judged)
