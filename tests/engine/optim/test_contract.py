"""On real worlds: dropped gradients, clipping, scalers, DDP, and ranks that do not hold the same thing."""

import math
import re
from typing import Any

import pytest
import torch
from contract_workers import clipped_alone, contract_facts
from once import once

from distmuon import launch

GRIDS = [(2, 2), (3, 1)]
on_every_grid = pytest.mark.parametrize(("dp", "tp"), GRIDS)


@once
def facts(dp: int, tp: int) -> list[dict[str, Any]]:
    """Return what each rank of one world has found out; the world runs once, when the first test asks."""
    return launch.run(contract_facts, dp=dp, tp=tp)


def one_sentence(dp: int, tp: int, *keys: str) -> str:
    """Return what all ranks say, which must be the same words, one sentence long."""
    said = set()
    for found in facts(dp, tp):
        for key in keys:
            found = found[key]
        said.add(found)
    (words,) = said
    assert isinstance(words, str)
    assert "\n" not in words
    assert words.endswith(".")
    return words


@on_every_grid
def test_a_dropped_gradient_does_not_count(dp: int, tp: int) -> None:
    for rank in facts(dp, tp):
        expected = rank["dropped"]["none"]
        for way, found in rank["dropped"].items():
            assert all(torch.equal(found[name], value) for name, value in expected.items()), way


@on_every_grid
def test_clip_grad_norm_is_max_norm_and_returns_what_one_process_sees(dp: int, tp: int) -> None:
    for rank in facts(dp, tp):
        by_option, by_method = rank["clipped"]["max_norm"], rank["clipped"]["method"]
        assert all(torch.equal(by_method["values"][name], value) for name, value in by_option["values"].items())
        assert by_method["norms"] == pytest.approx(clipped_alone(), rel=1e-6)  # the method returns float32
        assert min(by_method["norms"]) > 0.1  # or nothing would be clipped


@on_every_grid
def test_clipping_twice_or_adding_after_it_is_refused_and_zero_grad_begins_anew(dp: int, tp: int) -> None:
    for rank in facts(dp, tp):
        found = rank["clipping out of order"]
        assert found["twice"].startswith("RuntimeError: the gradients of this step are clipped already")
        assert found["added"].startswith("RuntimeError: gradients were changed after clip_grad_norm_")
        assert found["untouched"]
        assert found["present"] == frozenset()


@on_every_grid
def test_torchs_clipping_of_local_gradients_is_warned_about_once(dp: int, tp: int) -> None:
    for rank in facts(dp, tp):
        (words,) = rank["local clipping"]
        assert "did not see the global norm: call the optimizer's clip_grad_norm_" in words


@on_every_grid
def test_a_gradient_whose_square_no_float32_holds_is_refused(dp: int, tp: int) -> None:
    for rank in facts(dp, tp):
        for value in (3e38, 2e19):
            assert rank["huge"][value].startswith("NonFiniteGradient: the gradient of 0.weight, 2.weight, 0.bias")
            assert rank["huge"][value].endswith("(kept, True)")
        assert rank["huge"][1e18] == "nothing (moved, True)"


@on_every_grid
def test_an_infinity_on_one_rank_lets_all_scalers_skip_that_step(dp: int, tp: int) -> None:
    for rank in facts(dp, tp):
        found = rank["scaler"]
        for way in ("scaled", "unscaled first"):
            assert found[way]["skipped"] == 1
            for name, value in found["plain"]["values"].items():
                assert torch.equal(found[way]["values"][name], value)  # scales are powers of two
    scales = {rank["scaler"]["scaled"]["scale"] for rank in facts(dp, tp)}
    assert scales == {8.0, 4.0}  # only the rank that saw it lowers its own


@on_every_grid
def test_clipping_under_a_scaler_is_torchs_recipe(dp: int, tp: int) -> None:
    for rank in facts(dp, tp):
        found = rank["scaled clipping"]
        assert found["scaled"]["skipped"] == 1
        first, overflow, *others = found["scaled"]["norms"]
        assert not math.isfinite(overflow)
        assert [first, *others] == found["plain"]["norms"]
        for name, value in found["plain"]["values"].items():
            assert torch.equal(found["scaled"]["values"][name], value)
        assert "gradients were clipped before they were unscaled; call scaler.unscale_" in found["not unscaled"]
        assert found["afterwards"].startswith("NonFiniteGradient: ")


@on_every_grid
def test_gradients_made_anew_after_clipping_are_noticed_every_time(dp: int, tp: int) -> None:
    for rank in facts(dp, tp):
        assert rank["dropped after clipping"] == {
            "RuntimeError: gradients were changed after clip_grad_norm_ had reduced them"
        }


@on_every_grid
def test_what_one_rank_refuses_all_refuse_with_the_same_words(dp: int, tp: int) -> None:
    last = f"rank {dp * tp - 1}"
    assert f"max_norm is -1.0; give 0 or more, or None to leave gradients as they are on {last}" in one_sentence(
        dp, tp, "refused on one", "max_norm"
    )
    assert f"or the path of a .py file with your own on {last}, and fine on rank 0" in one_sentence(
        dp, tp, "refused on one", "strategy"
    )
    assert "parameter '0.weight' is now [7, 5] float32" in one_sentence(dp, tp, "refused on one", "moved")
    assert f"'step' is 0 on {last}, and 1 on rank 0" in one_sentence(dp, tp, "refused on one", "older state")
    assert {rank["refused on one"]["kept"] for rank in facts(dp, tp)} == {"True"}


@on_every_grid
def test_ddp_may_stay_around_the_model(dp: int, tp: int) -> None:
    for rank in facts(dp, tp):
        for way in ("with", "with views"):
            for name, value in rank["ddp"]["without"].items():
                assert torch.allclose(rank["ddp"][way][name], value, rtol=1e-9, atol=1e-12)


@on_every_grid
def test_a_model_that_was_moved_and_came_back_trains_on(dp: int, tp: int) -> None:
    assert all(0 < rank["moved"] < 1e-4 for rank in facts(dp, tp))


@on_every_grid
def test_a_model_whose_storage_was_moved_to_shared_memory_trains_on_to_the_bit(dp: int, tp: int) -> None:
    for rank in facts(dp, tp):
        for found in rank["shared memory"].values():
            assert len(found) == 4
            assert all(found.values()), found


@on_every_grid
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("values", r"the values of '0\.weight' .*and of 3 more differ: rank 3 .* or pass broadcast=True"),
        ("order", r"the parameters of rank 3 differ .* has '2\.weight' in the place of '0\.weight'"),
        ("one more", "the parameters of rank 3 differ .* rank 3 has 'more', which rank 0 has not"),
        ("shape", r"'0\.weight' is \[7, 6\] float64.* on rank 3, and \[7, 5\] float64"),
        ("learning rate", r"'lr of group 0' is 0\.5 on rank 3, and 0\.001 on rank 0"),
        ("group", "the parameters of rank 3 differ"),
        ("frozen", r"'0\.bias' is \[7\].*, in group 1, frozen on rank 3, and .*trained on rank 0"),
        ("matrices", r"'matrices of group 0' is \('rows', 1\) on rank 3, and 'whole' on rank 0"),
        ("bucket size", "'bucket_size' is 11 on rank 3, and [0-9]+ on rank 0"),
        ("max_norm", r"'max_norm' is 3\.0 on rank 3, and None on rank 0"),
        (
            "a refusal",
            "'the optimizer' is ValueError: parameter 'odd' of shape .2, 2, 2.*AdamW.* on rank 3, and fine on rank 0",
        ),
        ("strategy's choices", r"'gather_dtype' is torch\.float32 on rank 3, and None on rank 0"),
    ],
)
def test_ranks_that_differ_at_the_start_all_say_the_same(dp: int, tp: int, what: str, words: str) -> None:
    said = one_sentence(dp, tp, "start", what)
    assert re.match("RankMismatchError: .*" + words.replace("rank 3", f"rank {dp * tp - 1}"), said), said


@on_every_grid
def test_ranks_that_are_alike_start(dp: int, tp: int) -> None:
    assert {rank["start"]["nothing"] for rank in facts(dp, tp)} == {"nothing"}


@on_every_grid
def test_an_option_that_changes_on_one_rank_stops_all_before_anything_has_changed(dp: int, tp: int) -> None:
    assert "'lr of group 1' is 0.5 on rank" in one_sentence(dp, tp, "later", "said")
    assert all(rank["later"]["untouched"] for rank in facts(dp, tp))
    assert {rank["later"]["again"] for rank in facts(dp, tp)} == {"nothing"}
    assert "'max_norm' is 1.0 on rank 1, and 2.0 on rank 0" in one_sentence(dp, tp, "later", "clip")


@on_every_grid
def test_broadcast_begins_with_rank_0s_values_everywhere(dp: int, tp: int) -> None:
    first, *others = (rank["broadcast"] for rank in facts(dp, tp))
    for other in others:
        assert all(torch.equal(other[name], value) for name, value in first.items())


@on_every_grid
def test_replicas_that_drift_are_found_by_the_next_check(dp: int, tp: int) -> None:
    for rank in facts(dp, tp):
        assert rank["drift"][:2] == ["nothing", "nothing"]
        assert rank["drift"][2].startswith("RankMismatchError: the values of '2.weight'")
        assert rank["drift"][2].endswith("change parameters alike on every rank, or go back to a checkpoint.")


@on_every_grid
def test_weights_that_only_one_rank_has_loaded_are_found_in_the_next_step(dp: int, tp: int) -> None:
    assert {rank["written"]["all"] for rank in facts(dp, tp)} == {"nothing"}
    assert "change parameters alike on every rank" in one_sentence(dp, tp, "written", "one")


@on_every_grid
def test_a_state_that_only_one_rank_has_loaded_is_found_in_the_next_step(dp: int, tp: int) -> None:
    last = f"rank {dp * tp - 1}"
    assert f"'step' is 0 on {last}, and 2 on rank 0; set, load and keep them alike" in one_sentence(dp, tp, "loaded")
