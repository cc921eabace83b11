"""What the models write: words and their shares, letters drawn from the predictions, and the stored study."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

from distmuon.launch import World
from distmuon.models.language import Language
from muonbook.ch04 import writing
from muonbook.ch04.tables import stored_settings
from muonbook.ch04.tasks import CONTEXT, TASKS
from muonbook.ch04.writing import Word, share_in_words, words_of
from muonbook.measure import results

LEXICON = frozenset({"da", "duli", "no"})


def test_a_text_is_its_words_and_spaces_and_nothing_else() -> None:
    words = words_of("da  dull no", LEXICON)
    assert words == [Word("da", True), Word("  ", False), Word("dull", False), Word(" ", False), Word("no", True)]


def test_a_share_is_of_letters_without_spaces_and_without_words_that_may_be_cut() -> None:
    assert share_in_words(["du da dull no da"], LEXICON) == 4 / 8
    assert share_in_words(["zz duli zz", "zz xx zz"], LEXICON) == 4 / 6
    assert share_in_words(["da"], LEXICON) == share_in_words([], LEXICON) == 0.0


def test_the_language_itself_writes_words_that_exist_alone() -> None:
    language = Language.of(3)
    text = writing.spell(language.write(500, torch.Generator().manual_seed(0)))
    assert share_in_words([text], frozenset(language.words)) == 1.0


def test_letters_are_drawn_from_what_the_model_predicts_of_the_latest_window() -> None:
    class NextLetter(torch.nn.Module):
        def forward(self, letters: torch.Tensor) -> torch.Tensor:
            assert letters.shape[1] <= CONTEXT
            return torch.nn.functional.one_hot((letters + 1) % 27, 27) * 100.0

    written = writing.write(NextLetter(), 2, 80, torch.Generator().manual_seed(0))
    assert written.tolist() == [[(n + 1) % 27 for n in range(80)]] * 2


def test_three_models_write_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "LETTERS", 30)
    alone, task = World(0, 1, 1, 1, "gloo", "cpu", 60.0, 1, 0.0), replace(TASKS["language"], steps=4)
    found = writing.measure(alone, task, stored_settings("language"), [0])
    assert found == json.loads(json.dumps(found))
    assert (found["steps"], found["seeds"]) == ([1, 2, 3, 4], [0])
    assert set(found["writers"]) == {"sgd", "adamw", "muon"}
    for writer in found["writers"].values():
        assert [len(text) for text in writer["texts"]] == [writing.LETTERS] * 4
        assert all(0 <= share <= 1 for shares in writer["shares"] for share in shares)


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    return results.load("writing")


def test_what_is_stored_is_the_race_s_seeds_and_steps_and_its_shares_are_of_its_texts(stored) -> None:
    assert stored["steps"][-1] == TASKS["language"].steps
    assert len(stored["seeds"]) == 8
    assert tuple(stored["lexicon"]) == Language.of(stored["seeds"][0]).words
    assert list(stored["writers"]) == list(stored_settings("language"))
    lexicon = frozenset(stored["lexicon"])
    for writer in stored["writers"].values():
        for text, share in zip(writer["texts"], writer["shares"][0], strict=True):
            assert abs(share_in_words([text], lexicon) - share) < 0.35  # one text of sixteen


def test_in_the_end_muon_s_words_exist_and_sgd_s_seldom_do(stored) -> None:
    last = {name: [shares[-1] for shares in writer["shares"]] for name, writer in stored["writers"].items()}
    assert min(last["muon"]) > max(last["adamw"])
    assert statistics.median(last["muon"]) > 0.85
    assert statistics.median(last["sgd"]) < 0.3
