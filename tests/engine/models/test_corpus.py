"""Texts: what comes along is what it should be, batches depend on their step alone, what is held out is held out."""

from __future__ import annotations

import bz2
import hashlib
import math
import re
from pathlib import Path

import pytest
import torch

from distmuon.launch import UsageError
from distmuon.models.corpus import LETTERS, Corpus, corpus, decode, encode
from distmuon.models.language import ALPHABET, Language


def test_alice_is_all_there() -> None:
    alice = corpus("alice")
    text = bytes(torch.cat([alice.training, alice.held_out]).tolist())
    assert len(text) == 148_476
    assert text.lstrip().startswith(b"ALICE'S ADVENTURES IN WONDERLAND")
    assert text.endswith(b"THE END\n")
    assert text.count(b"CHAPTER") == 12
    assert (alice.vocabulary, alice.unit, alice.floor) == (256, "byte", None)
    assert 2 < 8 * len(bz2.compress(text)) / len(text) < 3  # bits per byte: it is English


def test_the_language_comes_with_its_floor() -> None:
    spoken = corpus("language")
    assert len(spoken.training) + len(spoken.held_out) == LETTERS
    assert int(spoken.training.max()) < spoken.vocabulary == len(ALPHABET)
    assert spoken.floor == pytest.approx(Language.of(0).rate)


def test_a_file_is_read_as_bytes_and_cut_in_nine_and_one(tmp_path: Path) -> None:
    (file := tmp_path / "mine.txt").write_bytes(bytes(range(256)) * 50)
    found = corpus(str(file))
    assert (len(found.training), len(found.held_out)) == (11_520, 1_280)
    assert torch.equal(torch.cat([found.training, found.held_out])[:256], torch.arange(256, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read (No such file or directory); name a file, or alice"),
        (b"short", "5 bytes; there must be 1"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(tmp_path: Path, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / "mine.txt").write_bytes(content)
    with pytest.raises(UsageError) as error:
        corpus(str(tmp_path / "mine.txt"))
    assert says in str(error.value)


def test_what_is_written_becomes_tokens_and_the_other_way_round() -> None:
    for name, written in (("alice", "Alice: 'é'"), ("my.txt", "naïve\n"), ("language", "to be or")):
        assert decode(encode(written, name, range(256)).tolist(), name) == written
    assert encode("é", "alice", range(256)).tolist() == [0xC3, 0xA9]
    assert encode(" b", "language", range(27)).tolist() == [0, 2]
    assert decode([65, 0xC3, 66], "alice") == "A\ufffdB"


@pytest.mark.parametrize(
    ("written", "name", "says"),
    [
        ("Hi!", "language", "--prompt 'Hi!': the text that the model was trained on contains no 'H', '!'; write a"),
        ("a b\u0107", "mine", "trained on contains no 'b', 'ć'; write a prompt without them."),
        ("abé", "mine", "trained on contains no 'b'; write a prompt without it."),
    ],
)
def test_a_prompt_of_what_the_text_does_not_contain_is_refused(written: str, name: str, says: str) -> None:
    known = range(27) if name == "language" else (*b"a ", 0xC3, 0xA9)
    with pytest.raises(UsageError, match=re.escape(says)):
        encode(written, name, known)


def counting() -> Corpus:
    return Corpus(torch.arange(200, dtype=torch.uint8), torch.arange(200, 250, dtype=torch.uint8), 256, "byte")


def test_a_batch_depends_on_its_step_and_seed_alone_and_parts_make_the_whole() -> None:
    tokens, following = counting().batch(3, 8, 5, seed=7)
    assert torch.equal(tokens + 1, following)
    parts = [counting().batch(3, 8, 5, 7, part, 4)[0] for part in range(4)]
    assert torch.equal(torch.cat(parts), tokens)
    assert not torch.equal(counting().batch(4, 8, 5, seed=7)[0], tokens)
    assert not torch.equal(counting().batch(3, 8, 5, seed=8)[0], tokens)


def test_a_texts_digest_is_that_of_its_bytes_and_tells_it_from_another_of_its_name(tmp_path: Path) -> None:
    (mine := tmp_path / "mine.txt").write_bytes(bytes(range(256)) * 50)
    found = corpus(str(mine))
    assert (len(found), found.sha256) == (12_800, hashlib.sha256(mine.read_bytes()).hexdigest())
    assert found.known == list(range(256))
    assert counting().known == list(range(200))  # not what is held out
    mine.write_bytes(bytes(range(255, -1, -1)) * 50)
    assert corpus(str(mine)).sha256 != found.sha256


def test_what_is_held_out_is_never_trained_on_and_evenly_looked_at() -> None:
    seen = torch.cat([counting().batch(step, 64, 10, 0)[1] for step in range(50)])
    assert (seen.min(), seen.max()) == (1, 199)
    tokens, following = counting().held_out_windows(4, 10)
    assert tokens[:, 0].tolist() == [200, 210, 220, 230]
    assert torch.equal(tokens + 1, following)
    assert math.isclose(len(counting().held_out_windows(100, 10)[0]), 100)
