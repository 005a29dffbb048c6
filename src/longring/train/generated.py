"""Generated sequences that what is far away explains: a genome that copies itself, a video of things that move.

Each is a pure function of its numbers, the same on every machine.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .checks import whole
from .draws import below, draws, one

VIDEO_VOCABULARY = 16  # the background, and five things of three shades each
SHADES = 3
_LETTERS = np.frombuffer(b"ACGT", np.uint8)  # so ordered that 3 - i is the letter that pairs with i


def genome_like(length: int, seed: int) -> Tensor:
    """`length` letters A, C, G and T, as bytes.

    Stretches of 50 to 499 letters: one in four is new, at random; the others are copies of what stands anywhere before,
    half of them read backwards on the other strand (as inverted repeats are), with one letter in a hundred drawn anew.
    So three letters in four are predicted by what may be the whole length away, and by nothing near.
    """
    whole(length, "length", least=1)
    whole(seed, "seed", least=0)
    genome = np.empty(length, np.uint8)
    at = number = 0
    while at < length:
        stretch = _stretch(genome[:at], seed, number)[: length - at]
        genome[at : at + len(stretch)] = stretch
        at, number = at + len(stretch), number + 1
    return torch.from_numpy(_LETTERS[genome].astype(np.int64))


def _stretch(before: NDArray[np.uint8], seed: int, number: int) -> NDArray[np.uint8]:
    choices = draws(4, seed, number, 0)
    size = 50 + one(450, choices[0])
    drawn = draws(size, seed, number, 1)
    fresh = below(4, drawn).astype(np.uint8)
    if len(before) < size or one(4, choices[1]) == 0:
        return fresh
    place = one(len(before) - size + 1, choices[2])
    copied = before[place : place + size]
    if one(2, choices[3]) == 0:
        copied = 3 - copied[::-1]
    return np.where(below(100, draws(size, seed, number, 2)) == 0, fresh, copied)


def video_like(frames: int, height: int, width: int, seed: int) -> Tensor:
    """Patches of frames, row by row and frame after frame, [frames * height * width] tokens below VIDEO_VOCABULARY.

    Before a background of 0, three to five rectangles move by whole patches, each at its own steady pace, and leaving
    on one side come back on the other; later ones cover earlier ones. Thing k has the tokens 1 + 3 k to 3 + 3 k, in
    diagonal stripes. Where a thing will be takes two frames to know, and what was covered takes longer.
    """
    for value, name, least in ((frames, "frames", 1), (height, "height", 2), (width, "width", 2), (seed, "seed", 0)):
        whole(value, name, least=least)
    video = np.zeros((frames, height, width), np.int64)
    times = np.arange(frames)[:, None, None]
    for thing in range(3 + one(3, draws(1, seed)[0])):
        places = draws(6, seed, thing)
        rows = np.arange(2 + one(max(1, height // 2 - 1), places[0]))[:, None]
        columns = np.arange(2 + one(max(1, width // 2 - 1), places[1]))
        down, right = _pace(places[2:4])
        y = (one(height, places[4]) + down * times + rows) % height
        x = (one(width, places[5]) + right * times + columns) % width
        video[times, y, x] = 1 + SHADES * thing + (rows + columns) % SHADES
    return torch.from_numpy(video.reshape(-1))


def _pace(drawn: NDArray[np.uint64]) -> tuple[int, int]:
    """Up to two patches a frame either way, and never none."""
    down, right = (one(5, draw) - 2 for draw in drawn)
    return (down, right) if (down, right) != (0, 0) else (1, 1)
