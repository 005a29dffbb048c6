"""Generated data: what is planted is there, what is promised of its structure holds, and it is the same for ever."""

from __future__ import annotations

from hashlib import blake2b
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longring.errors import ArgumentError
from longring.train.corpus import open_corpus
from longring.train.fasta import write_fasta
from longring.train.generated import VIDEO_VOCABULARY, genome_like, video_like
from longring.train.retrieval import passkey
from longring.train.token_files import write_tokens


def text(tokens):
    return bytes(tokens.tolist())


def digest(tokens):
    return blake2b(tokens.numpy().astype("<i8").tobytes(), digest_size=6).hexdigest()


# ---------------------------------------------------------------------------------------------------------- passkey


@given(context=st.integers(130, 3000), depth=st.floats(0, 1), seed=st.integers(0, 2**40), digits=st.integers(1, 8))
def test_the_key_is_planted_where_it_was_asked_for_and_asked_for_at_the_end(context, depth, seed, digits):
    found = passkey(context, depth, seed, digits=digits)
    tokens, answer = found
    said = text(tokens)
    key = said[answer.start : answer.stop]
    assert tokens.shape == (context,)
    assert tokens.dtype == torch.int64
    assert answer.stop == context
    assert key.isdigit()
    assert len(key) == digits
    assert said.endswith(b" What is the pass key? The pass key is " + key)
    planted = b" The pass key is " + key + b". Remember it. "
    assert said.count(planted) == 1
    filler = context - len(planted) - len(b" What is the pass key? The pass key is ") - digits
    assert abs(said.index(planted) - depth * filler) <= 0.5
    rest = said.replace(planted, b"")[:filler]
    assert not any(letter in b"0123456789" for letter in rest)
    assert text(tokens[found.planted.start : found.planted.stop]) == key
    assert found.planted.stop <= said.index(planted) + len(planted)


def test_targets_are_the_answer_alone():
    found = passkey(300, 0.25, 3)
    wanted = found.targets != -100
    assert torch.nonzero(wanted).flatten().tolist() == [294, 295, 296, 297, 298]
    assert torch.equal(found.targets[wanted], found.tokens[found.answer.start : found.answer.stop])


def test_depth_moves_the_key_and_nothing_else():
    one, other = passkey(500, 0.1, 9), passkey(500, 0.9, 9)
    assert one.planted.start < 70
    assert other.planted.start > 350
    assert torch.equal(one.tokens[one.answer.start :], other.tokens[other.answer.start :])
    assert sorted(one.tokens.tolist()) == sorted(other.tokens.tolist())
    assert len({text(passkey(200, 0.5, seed).tokens[-5:]) for seed in range(50)}) == 50


def test_keys_are_drawn_evenly():
    counts = np.bincount([int(text(passkey(130, 0, seed, digits=1).tokens[-1:])) for seed in range(1000)])
    assert len(counts) == 10
    assert counts.min() > 60  # 100 is what chance gives, with a standard deviation of 9.5


def test_the_filler_may_be_text_of_a_corpus(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"<{number}>" * 20)
    corpus = open_corpus(tmp_path)
    said = text(passkey(600, 1.0, 5, corpus=corpus).tokens)
    filler = said[: said.index(b" The pass key is ")]
    around = b"".join(f"<{number}>".encode() * 20 for number in range(4)) * 10
    assert filler in around
    assert len({text(passkey(600, 1.0, seed, corpus=corpus).tokens[:9]) for seed in range(40)}) > 8
    np.save(tmp_path / "tokens.npy", np.arange(9))
    with pytest.raises(ArgumentError, match=r"the filler must be text, but tokens\.npy has a vocabulary of 10"):
        passkey(600, 1.0, 5, corpus=open_corpus(tmp_path / "tokens.npy"))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ((75, 0.5, 0), "a key of 5 digits and its question take 81 tokens, got a context of 75"),
        ((500, 1.5, 0), "depth must be from 0, the beginning, to 1, the end; got 1.5"),
        ((500, float("nan"), 0), "got nan"),
        ((500, 0.5, -1), "seed must be a whole number from 0, got -1"),
    ],
)
def test_keys_that_cannot_be_planted(asked, says):
    with pytest.raises(ArgumentError, match=says):
        passkey(*asked)


def test_no_digits_are_no_key():
    with pytest.raises(ArgumentError, match="digits must be a whole number from 1 to 18, got 0"):
        passkey(500, 0.5, 0, digits=0)


# ----------------------------------------------------------------------------------------------------------- genome


@pytest.mark.parametrize("seed", range(3))
def test_a_genome_repeats_itself_far_away_with_a_few_errors(seed):
    genome = text(genome_like(60_000, seed))
    assert set(genome) == set(b"ACGT")
    complement = bytes.maketrans(b"ACGT", b"TGCA")
    reverse = genome.translate(complement)[::-1]
    seen = [place for place in range(30_000, 59_976, 101) if genome.index(genome[place : place + 24]) < place]
    turned = [place for place in range(30_000, 59_976, 101) if genome[place : place + 24] in reverse]
    assert len(seen) > 70  # of 297; of random letters none
    assert len(turned) > 70
    far = [place - genome.index(genome[place : place + 24]) for place in seen]
    assert np.median(far) > 5_000


def test_a_genome_can_be_written_and_read(tmp_path):
    genomes = [genome_like(length, 7) for length in (1, 60, 61, 2500)]
    assert text(genomes[3][:61]) == text(genomes[2])  # longer ones go on where shorter ones end
    write_fasta(tmp_path / "a.fa", genomes)
    corpus = open_corpus(tmp_path / "a.fa")
    assert [int(length) for length in corpus.lengths] == [1, 60, 61, 2500]
    assert bytes(corpus.tokens(3, 100, 2000)) == text(genomes[3])[100:2000]
    lines = (tmp_path / "a.fa").read_text().splitlines()
    assert lines[:2] == [">sequence 0", text(genomes[0]).decode()]
    assert max(map(len, lines)) == 60


def test_what_fasta_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="sequence 1 holds a byte that is no letter of FASTA: 10"):
        write_fasta(tmp_path / "a.fa", [b"ACGT", b"AC\nGT"])


# ------------------------------------------------------------------------------------------------------------ video


@pytest.mark.parametrize("seed", range(4))
def test_what_moves_moves_on(seed):
    frames = video_like(40, 12, 15, seed).view(40, 12, 15)
    assert frames.min() == 0
    assert 3 < frames.max() < VIDEO_VOCABULARY
    assert all(not torch.equal(a, b) for a, b in pairwise(frames))
    period = np.lcm(12, 15)  # everything moves by whole patches a frame, and comes back around
    again = video_like(int(period) + 2, 12, 15, seed).view(-1, 12, 15)
    assert torch.equal(again[0], again[period])
    assert torch.equal(again[:40], frames)
    top = int(frames.max() - 1) // 3  # the thing that covers all others, and is never covered
    is_top = (frames - 1).div(3, rounding_mode="floor") == top
    steps = [
        (dy, dx)
        for dy in range(-2, 3)
        for dx in range(-2, 3)
        if all(torch.equal(is_top[t].roll((dy, dx), (0, 1)), is_top[t + 1]) for t in range(39))
    ]
    assert len(steps) == 1
    assert steps != [(0, 0)]


def test_a_video_can_be_written_and_read(tmp_path):
    videos = [video_like(6, 8, 8, seed) for seed in range(3)]
    write_tokens(tmp_path / "videos.bin", videos, vocabulary=VIDEO_VOCABULARY)
    corpus = open_corpus(tmp_path / "videos.bin")
    assert (corpus.documents, corpus.vocabulary) == (3, VIDEO_VOCABULARY + 1)
    assert corpus.tokens(1, 0, 384).tolist() == videos[1].tolist()


@pytest.mark.parametrize("asked", [(0, 8, 8, 0), (4, 1, 8, 0), (4, 8, 2.5, 0), (4, 8, 8, -1)])
def test_videos_that_cannot_be(asked):
    with pytest.raises(ArgumentError, match="must be a whole number from"):
        video_like(*asked)


# ------------------------------------------------------------------------------------------------------------- ever


def test_all_of_them_are_what_they_were_in_earlier_versions():
    found = [passkey(400, 0.5, 1).tokens, genome_like(5000, 1), video_like(9, 10, 11, 1)]
    assert [digest(tokens) for tokens in found] == ["fb013bc9175a", "a39feac5c921", "a9c4d4aed3af"]
