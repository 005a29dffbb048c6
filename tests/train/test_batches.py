"""Sequences against a slow definition: everything in memory, laid end to end, and cut."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import longring as lr
from longring.errors import ArgumentError
from longring.nn import next_tokens
from longring.testing import run_ranks
from longring.train.batches import NOTHING, Sequences, shuffled
from longring.train.corpus import open_corpus
from longring.train.held_out import part_of


def documents_of(corpus, split):
    """Whole documents of a split as lists, each with its end; by their place in the split."""
    part = part_of(corpus, split)
    whole = [corpus.tokens(document, 0, corpus.lengths[document]).tolist() for document in part.documents]
    if corpus.documents == 1:
        whole = [whole[0][part.start : part.start + int(part.lengths[0])]]
    return [[*tokens, corpus.end] for tokens in whole]


def laid_end_to_end(corpus, seed, split, at_least):
    """[(token, what it is to predict, whether a document begins here)] of as many epochs as it takes."""
    documents, line, epoch = documents_of(corpus, split), [], 0
    while len(line) < at_least:
        for number in shuffled(len(documents), seed, epoch):
            tokens = documents[number]
            line += zip(tokens, [*tokens[1:], -100], [True] + [False] * (len(tokens) - 1), strict=True)
        epoch += 1
    return line


@st.composite
def corpora(draw):
    """Texts of a few tiny documents."""
    return draw(st.lists(st.binary(min_size=1, max_size=12).filter(lambda text: 0 not in text), min_size=1, max_size=9))


def written(folder, texts):
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_bytes(text)
    return open_corpus(folder)


@given(
    texts=corpora(), context=st.integers(2, 40), seed=st.integers(0, 3), split=st.sampled_from(["train", "held-out"])
)
def test_sequences_are_what_the_slow_definition_cuts(tmp_path_factory, texts, context, seed, split):
    corpus = written(tmp_path_factory.mktemp("corpus") / "texts", texts)
    if corpus.documents == 1 and corpus.lengths[0] < 2:
        return
    cut = Sequences(corpus, context=context, seed=seed, split=split)
    count = 3 * cut.per_epoch + 2
    line = laid_end_to_end(corpus, seed, split, count * context + 1)
    for number in np.random.default_rng(seed).permutation(count):  # in any order
        part = line[number * context : (number + 1) * context]
        found = cut.sequence(int(number))
        assert found.tokens.tolist() == [token for token, _, _ in part]
        assert found.targets.tolist() == [target for _, target, _ in part]
        begins = [0] + [i for i, (_, _, begin) in enumerate(part) if begin and i]
        assert found.documents == (*begins, context)
        assert found.tokens.dtype == found.targets.dtype == torch.int64


@given(texts=corpora(), context=st.integers(2, 40))
def test_every_token_is_read_and_predicted_once_an_epoch(tmp_path_factory, texts, context):
    corpus = written(tmp_path_factory.mktemp("corpus") / "texts", [*texts, b"one more", b"and another"])
    for split in ("train", "held-out"):
        cut = Sequences(corpus, context=context, seed=1, split=split)
        documents = documents_of(corpus, split)
        assert cut.tokens_per_epoch == sum(map(len, documents))
        assert cut.per_epoch == -(-cut.tokens_per_epoch // context)
        parts = [cut.sequence(number) for number in range(cut.per_epoch)]
        once = slice(0, cut.tokens_per_epoch)
        tokens = torch.cat([part.tokens for part in parts])[once]
        targets = torch.cat([part.targets for part in parts])[once]
        assert Counter(tokens.tolist()) == Counter(token for tokens in documents for token in tokens)
        predicted = Counter(token for tokens in documents for token in tokens[1:])
        assert Counter(targets[targets != NOTHING].tolist()) == predicted


def test_targets_mean_what_next_tokens_means(tmp_path):
    corpus = written(tmp_path / "texts", [bytes([65 + i]) * (3 * i + 1) for i in range(8)])
    cut = Sequences(corpus, context=11, seed=5)
    for number in range(10):
        tokens, targets, documents = cut.sequence(number)
        expected = next_tokens(tokens[None], documents=documents)[0]
        assert torch.equal(targets[:-1], expected[:-1])
        if tokens[-1] != corpus.end:  # the document runs on: what follows is known, though it is in the next sequence
            assert targets[-1] == cut.sequence(number + 1).tokens[0]
        else:
            assert targets[-1] == -100


def test_the_order_of_documents_is_a_permutation_that_seed_and_epoch_change():
    orders = {(seed, epoch): shuffled(1000, seed, epoch) for seed in range(3) for epoch in range(3)}
    assert all(sorted(order) == list(range(1000)) for order in orders.values())
    assert len({order.tobytes() for order in orders.values()}) == 9
    agreeing = np.mean([np.mean(shuffled(1000, 7, epoch) == shuffled(1000, 7, epoch + 1)) for epoch in range(20)])
    assert agreeing < 0.005  # a thousandth is what chance gives
    first = np.mean([shuffled(1000, seed, 0)[0] for seed in range(300)])
    assert 430 < first < 570  # standard deviation 17


PINNED_ORDERS = [[8, 3, 1, 0, 2, 4, 6, 7, 5, 9], [7, 5, 1, 8, 3, 2, 9, 6, 4, 0], [4, 7, 0, 3, 9, 5, 6, 2, 1, 8]]


def test_the_order_is_that_of_checkpoints_written_by_earlier_versions():
    assert shuffled(10, 0, 0).tolist() == PINNED_ORDERS[0]
    assert shuffled(10, 1, 0).tolist() == PINNED_ORDERS[1]
    assert shuffled(10, 0, 1).tolist() == PINNED_ORDERS[2]


# ---------------------------------------------------------------------------------------------------------- ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"document {number} " * (number % 7 + 1))
    return folder


def seen(group, folder, layout):
    """What a rank that opened the data by itself has of three sequences, dealt and collected again."""
    cut = Sequences(open_corpus(folder), context=203, seed=11)
    found = []
    for number in range(3):
        sequence = cut.sequence(number)
        s = lr.Sharding(
            length=203, group=group, layout=layout, documents=sequence.documents if layout == "dealt" else None
        )
        tokens, targets = (s.shard(x[None]) for x in (sequence.tokens, sequence.targets))
        assert torch.equal(tokens[0], sequence.tokens[s.positions])
        found.append((s.unshard(tokens)[0], s.unshard(targets)[0], sequence.documents))
    return found


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "dealt"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_number_of_ranks_in_any_layout_has_the_same_sequences(folder, ranks, layout):
    alone = Sequences(open_corpus(folder), context=203, seed=11)
    for found in run_ranks(ranks, partial(seen, folder=folder, layout=layout)):
        for number, (tokens, targets, documents) in enumerate(found):
            expected = alone.sequence(number)
            assert torch.equal(tokens, expected.tokens)
            assert torch.equal(targets, expected.targets)
            assert documents == expected.documents


def seen_by_a_process(folder, layout):
    return [
        (tokens.tolist(), targets.tolist(), documents)
        for tokens, targets, documents in seen(dist.group.WORLD, folder, layout)
    ]


@pytest.mark.processes
def test_real_ranks_have_them_too(folder):
    alone = [Sequences(open_corpus(folder), context=203, seed=11).sequence(number) for number in range(3)]
    expected = [(tokens.tolist(), targets.tolist(), documents) for tokens, targets, documents in alone]
    assert lr.launch(seen_by_a_process, folder, "zigzag", ranks=3, timeout=100) == [expected] * 3


def test_a_pickled_copy_gives_the_same(folder):
    cut = Sequences(open_corpus(folder), context=64, seed=3)
    before = cut.sequence(5)
    after = pickle.loads(pickle.dumps(cut)).sequence(5)
    assert torch.equal(before.tokens, after.tokens)


# --------------------------------------------------------------------------------------------------------- splits


@given(texts=corpora())
def test_splits_share_no_document_and_miss_none(tmp_path_factory, texts):
    corpus = written(tmp_path_factory.mktemp("corpus") / "texts", [*texts, b"one more"])
    train, held = (set(part_of(corpus, split).documents.tolist()) for split in ("train", "held-out"))
    assert train
    assert held
    assert not train & held
    assert train | held == set(range(corpus.documents))


def test_about_a_twentieth_of_many_documents_is_held_out(tmp_path):
    (tmp_path / "reads.fa").write_text("".join(f">read {i}\nACGT\n" for i in range(20_000)))
    corpus = open_corpus(tmp_path)
    held = part_of(corpus, "held-out").documents
    assert 0.045 < len(held) / corpus.documents < 0.055
    assert len(part_of(corpus, "train").documents) + len(held) == 20_000


def test_a_document_stays_in_its_split_when_others_come_and_go(tmp_path):
    for number in range(300):
        (tmp_path / f"{number:03}.txt").write_text(f"document {number}")
    before = {corpus_names(tmp_path)[d] for d in part_of(open_corpus(tmp_path), "held-out").documents}
    for number in range(0, 300, 2):
        (tmp_path / f"{number:03}.txt").unlink()
    (tmp_path / "999.txt").write_text("came later")
    (tmp_path / "001.txt").write_text("changed its text")
    names = corpus_names(tmp_path)
    after = {names[d] for d in part_of(open_corpus(tmp_path), "held-out").documents}
    assert len(before) > 5
    assert after - {"999.txt"} == before & set(names)


def corpus_names(folder):
    return sorted(os.listdir(folder))


def test_few_documents_hold_out_the_one_nearest_to_a_twentieth(tmp_path):
    sizes = {"long.txt": 2000, "middle.txt": 100, "short.txt": 3}
    for name, size in sizes.items():
        (tmp_path / name).write_text("x" * size)
    corpus = open_corpus(tmp_path)
    assert [sizes[corpus_names(tmp_path)[d]] for d in part_of(corpus, "held-out").documents] == [100]


def test_one_document_is_split_by_position(tmp_path):
    text = bytes(1 + i % 250 for i in range(1000))
    (tmp_path / "book.txt").write_bytes(text)
    corpus = open_corpus(tmp_path / "book.txt")
    train = Sequences(corpus, context=951, seed=0).sequence(0)
    held = Sequences(corpus, context=51, seed=0, split="held-out").sequence(0)
    assert bytes(train.tokens[:-1].tolist()) == text[:950]
    assert bytes(held.tokens[:-1].tolist()) == text[950:]
    assert train.tokens[-1] == held.tokens[-1] == corpus.end == 256
    assert train.targets[-1] == held.targets[-1] == -100


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"context": 1}, "context must be a whole number from 2, got 1"),
        ({"context": 2.5}, "context must be a whole number from 2, got 2.5"),
        ({"context": True}, "context must be a whole number from 2, got True"),
        ({"context": 2**63}, r"context must be below 2\*\*63, got 9223372036854775808"),
        ({"seed": -1}, "seed must be a whole number from 0, got -1"),
        ({"seed": 2**64}, r"seed must be below 2\*\*63, got 18446744073709551616"),
        ({"split": "test"}, "split must be 'train' or 'held-out', got 'test'"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_line(folder, asked, says):
    with pytest.raises(ArgumentError, match=says) as raised:
        Sequences(open_corpus(folder), **{"context": 8, "seed": 0, **asked})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (-1, "number must be a whole number from 0, got -1"),
        (1.0, "number must be a whole number from 0, got 1.0"),
        (2**60, r"sequence 1152921504606846976 of 64 tokens lies beyond token 2\*\*63"),
    ],
)
def test_numbers_that_no_sequence_has_are_refused(folder, number, says):
    with pytest.raises(ArgumentError, match=says):
        Sequences(open_corpus(folder), context=64, seed=0).sequence(number)


def test_a_document_of_one_token_cannot_be_split(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ArgumentError, match=r"a\.txt is one document of 1 token: .* give more text"):
        Sequences(open_corpus(tmp_path / "a.txt"), context=8, seed=0)


# --------------------------------------------------------------------------------------------------------- memory


def resident():
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux how much is in memory")
def test_three_gigabytes_open_at_once_and_take_no_memory(tmp_path):
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        file.write(b"begins as text " * 1000)
        file.truncate(3_000_000_000)
        file.seek(-4, os.SEEK_END)
        file.write(b"ends")
    before = resident()
    corpus = open_corpus(path)
    cut = Sequences(corpus, context=1 << 20, seed=0)
    assert corpus.lengths[0] == 3_000_000_000
    cut.sequence(0)
    most = max(resident() for number in range(0, cut.per_epoch, 60) if cut.sequence(number))
    assert cut.per_epoch > 2700
    assert most - before < 100_000_000  # a sequence and its targets are 16 MiB, and malloc keeps what was freed
    held = Sequences(corpus, context=150_000_001, seed=0, split="held-out")
    assert held.per_epoch == 1
