"""Newton–Schulz by all-reduced Gram matrices: the same result, the bytes of the formula, and when they are fewer."""

from fractions import Fraction
from typing import Any

import gram_workers as work
import pytest
from once import once
from torch.utils.flop_counter import FlopCounterMode

from distmuon import launch
from distmuon.models.networks import ALONE
from distmuon.optim.newton_schulz import flops
from muonbook.ch16 import gram_over_tp as gram

sizes = pytest.mark.parametrize("tp", [1, 2, 4])


@once
def facts(tp: int) -> list[dict[str, Any]]:
    return launch.run(work.facts, tp=tp)


@sizes
def test_every_rank_ends_with_its_block_of_whole_newton_schulz(tp: int) -> None:
    for rank in facts(tp):
        assert len(rank["cases"]) >= 9 * len(work.FORMS)
        for case, (difference, _, _, untouched) in rank["cases"].items():
            assert difference < 1e-12, case
            assert untouched, case
        assert not rank["zero"].any()
        assert 1e-9 < rank["float32 at once"] < 1e-4


@sizes
def test_the_ledger_counts_what_was_predicted_and_the_formula_sums_it_up(tp: int) -> None:
    ranks = facts(tp)
    for case, (_, ledger, predicted, _) in ranks[0]["cases"].items():
        (shape, dim, form, triangle), segments = case, work.FORMS[case[2]]
        assert ledger.differences(predicted) == [], case
        together = sum(rank["cases"][case][1].total().sent_bytes for rank in ranks)
        assert together == gram.gram_bytes(shape[1 - dim], tp, 8, segments, triangle), case
        assert ledger.total().calls == (len(segments) + 1 if tp > 1 else 0), form


@pytest.mark.parametrize(("shape", "dim"), [((24, 48), 1), ((48, 24), 0), ((24, 48), 0)])
@pytest.mark.parametrize("segments", [gram.STEPWISE, (2, 1, 1, 1), gram.AT_ONCE])
def test_operations_are_those_that_torch_counts(shape: tuple[int, int], dim: int, segments: tuple[int, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        gram.newton_schulz_over_tp(work.whole(shape), ALONE, dim, segments)
    assert counter.get_total_flops() == gram.gram_flops(shape, dim, 1, segments)
    repeated = gram.gram_flops(shape, dim, 4, segments) - gram.gram_flops(shape, dim, 1, segments)
    assert repeated > 0  # every rank makes the products of [u, u]
    if segments == gram.STEPWISE and shape[1 - dim] < shape[dim]:
        assert gram.gram_flops(shape, dim, 1, segments) == flops(shape)


def test_gram_sends_less_beyond_the_break_even_and_more_before_it() -> None:
    for segments, item_bytes, triangle in gram.FORMS.values():
        for tp in (2, 4, 8):
            limit = gram.break_even(tp, segments, item_bytes, 2, triangle)
            assert limit.denominator == 1
            for u in (1024, 4096):
                for factor, fewer in ((Fraction(1, 2), False), (2, True)):
                    v = int(u * limit * factor)
                    sent, owned = (
                        gram.gram_bytes(u, tp, item_bytes, segments, triangle),
                        gram.owner_bytes((u, v), tp, 2),
                    )
                    assert (sent < owned) == fewer, (segments, tp, u, v)
    assert gram.break_even(2, gram.STEPWISE, 2, 2) == 10
    assert gram.break_even(2, gram.AT_ONCE, 4, 2, triangle=True) == 2


def test_the_table_holds_integers_and_says_who_sends_fewer() -> None:
    lines = gram.table(((1024, 4096),), (2,))
    assert len(lines) == 2 + len(gram.FORMS)
    assert max(map(len, lines)) <= 92
    owner = 2 * 1024 * 2048 * 2
    assert f"{owner:,}" in lines[1]
    assert lines[2].endswith("owner")
    assert lines[-1].endswith("Gram")


def test_owners_formula_is_what_the_strategy_is_predicted_to_send() -> None:
    from distmuon.sharding.layout import ParamSpec
    from distmuon.sharding.ownership import plan_owned
    from distmuon.verify.prediction import predict_step

    specs = [ParamSpec("w", (64, 32), "float32", 1)]
    layout = plan_owned(specs, {0: 1.0}, 1, 4, 10_000)
    ledgers = [predict_step(layout, 4, 0, [0], "owner", tp_rank=rank) for rank in range(4)]
    assert sum(each.total(group="tp").sent_bytes for each in ledgers) == gram.owner_bytes((64, 128), 4, 2)
