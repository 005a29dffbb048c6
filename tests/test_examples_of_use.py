"""The examples of long sequences, in small: what they say they found is there, and more of it the further they look."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest
import torch

import longring as lr

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import code_base
import genome
import long_document
import video

pytestmark = pytest.mark.processes


@pytest.fixture
def said(monkeypatch, capsys):
    """What the main function of an example prints, on ranks that are started here."""

    def run(example, *arguments) -> str:
        monkeypatch.setattr(sys, "argv", [example.__file__, *map(str, arguments)])
        example.main()
        return capsys.readouterr().out

    return run


def test_a_code_base_knows_where_a_passage_stood_before(said, tmp_path):
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(300)]
    lines = [" ".join(draw.choices(words, k=6)) for _ in range(120)]
    (tmp_path / "a.py").write_text("\n".join(lines[:60]))
    (tmp_path / "b.py").write_text("\n".join([*lines[60:], *lines[10:17]]))  # 7 lines of 6 words, and 6 line ends
    text = said(code_base, tmp_path, "--tokens", 4000)
    rates = [float(rate) for rate in re.findall(r"^ +[\d,]+ +([\d.]+)%", text, re.MULTILINE)]
    assert len(rates) == 2
    assert 4 < rates[1] - rates[0] < 7  # 48 of 887 tokens were there before, more than 256 back
    first = re.search(r"^  (\d+) tokens, ([\d,]+) back: (\S+) as in (\S+): ", text, re.MULTILINE)
    assert first is not None, text
    assert 47 <= int(first[1]) <= 49
    assert int(first[2]) == 769
    assert first[3] in ("b.py:60", "b.py:61")
    assert first[4] in ("a.py:10", "a.py:11")


def test_a_genome_is_read_on_both_strands():
    """The second half is the first, read backwards on the other strand."""
    half = torch.randint(4, (400,), generator=torch.Generator().manual_seed(0))
    letters = torch.cat([half, 3 - half.flip(0)])
    q, k, v = genome.lookup(letters)
    out, lse = lr.attention(q, k, v, scale=genome.SHARPNESS, return_lse=True)
    next_letters, known = letters[430:], slice(429, -1)
    assert torch.equal(out[0, known, 1, :4].argmax(dim=1), next_letters)
    assert (out[0, known, 0, :4].argmax(dim=1) == next_letters).double().mean() < 0.5
    assert (lse[0, 1, known] > genome.UNSURE).all()
    assert (lse[0, 0, known] < genome.UNSURE).double().mean() > 0.9


def test_a_genome_is_known_the_better_the_further_one_looks(said):
    text = said(genome, "--letters", 6000)
    rows = re.findall(r"^([a-zL].*?) +([\d.]+) +([\d.]+) +[\d.]+$", text, re.MULTILINE)
    bits = {name: (float(ours), float(both)) for name, ours, both in rows}
    assert list(bits) == ["the last 1,024", "the last 4,096", "LongNet, thinned out", "all before"]
    ours, both = bits["all before"]
    assert both < ours < 2.01
    assert 0.5 < both < bits["the last 4,096"][1] < bits["the last 1,024"][1] < 2.01  # one letter in four is new


def test_lost_patches_are_found_in_other_frames(said):
    text = said(video, "--frames", 8)
    assert "as one sequence of 2,048, 40% lost" in text
    rows = re.findall(r"^(\S.*?) +([\d.]+)% +([\d.]+)%", text, re.MULTILINE)
    things = {name: float(share) for name, share, _ in rows}
    assert len(things) == 5
    assert things["the frame before, as it was"] < things["about its own frame"] < things["all frames"]
    assert things["about its own frame"] < things["LongNet, all frames thinly"]


def test_a_document_is_read_alike_by_any_number_of_ranks(said, tmp_path):
    document = tmp_path / "text.txt"
    document.write_text(" ".join(random.Random(0).choices(["the", "ring", "of", "tokens", "goes", "on"], k=3000)))
    found = []
    for ranks in (1, 2):
        text = said(long_document, document, "--context", 100, "--steps", 8, "--ranks", ranks)
        found.append([float(bits) for bits in re.findall(r" ([\d.]+)$", text, re.MULTILINE)])
    alone, dealt = found
    assert len(alone) == 5  # two frequencies, and three stretches of positions
    assert dealt == pytest.approx(alone, abs=0.02)
    assert alone[1] < alone[0] < 8
    assert alone[-1] < 6  # of 8 before it learned anything
