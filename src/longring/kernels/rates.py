"""Which operation is the fastest for a stack, by measurement.

The cases were measured on one H200 (torch 2.11.0, cuDNN 9.19, flash-attn-4 4.0.0b36; bfloat16, medians of four), in
TFLOP/s of the pairs that are kept. A stack goes by the case nearest to it in work and in the size of its tiles: small
differences between cases may be noise, and then it does not matter which is taken. Generations that nobody measured
go by rank.
"""

from __future__ import annotations

from functools import lru_cache
from math import log2
from typing import Literal, NamedTuple

Pass = Literal["forward", "backward"]


Rate = tuple[int, int]  # forward, backward


class Case(NamedTuple):
    d: int
    heads: int  # of all batch rows and repeats together
    rows: int
    cols: int
    causal: bool
    cudnn: Rate
    flash: Rate
    efficient: Rate | None
    flash_attn_4: Rate


HOPPER = (
    Case(64, 16, 1024, 1024, True, (32, 82), (56, 72), (32, 35), (13, 51)),
    Case(64, 16, 2048, 2048, True, (137, 160), (112, 122), (53, 53), (83, 136)),
    Case(64, 16, 4096, 4096, True, (259, 274), (168, 190), (81, 74), (214, 293)),
    Case(64, 16, 8192, 8192, True, (320, 349), (224, 237), (107, 88), (363, 446)),
    Case(64, 16, 16384, 16384, True, (411, 449), (280, 275), None, (501, 544)),
    Case(64, 16, 32768, 32768, True, (460, 432), (286, 278), None, (577, 560)),
    Case(64, 16, 2048, 1024, False, (139, 209), (139, 169), (90, 72), (56, 117)),
    Case(64, 16, 4096, 2048, False, (297, 334), (227, 234), (112, 75), (168, 308)),
    Case(64, 16, 8192, 4096, False, (399, 424), (277, 270), (123, 95), (338, 474)),
    Case(64, 16, 4096, 8192, False, (405, 426), (279, 267), (114, 98), (342, 472)),
    Case(64, 16, 16384, 8192, False, (461, 467), (301, 283), None, (497, 559)),
    Case(64, 16, 8192, 8192, False, (391, 447), (290, 277), (126, 101), (411, 520)),
    Case(64, 16, 32768, 16384, False, (480, 465), (286, 288), None, (544, 557)),
    Case(64, 512, 2048, 2048, True, (375, 325), (260, 222), (120, 95), (293, 377)),
    Case(64, 2048, 512, 512, True, (215, 156), (145, 132), (96, 78), (131, 186)),
    Case(64, 8192, 128, 128, True, (89, 48), (71, 45), (53, 61), (40, 54)),
    Case(128, 16, 1024, 1024, True, (57, 101), (71, 84), (45, 50), (27, 55)),
    Case(128, 16, 2048, 2048, True, (185, 190), (121, 135), (86, 67), (91, 156)),
    Case(128, 16, 4096, 4096, True, (346, 341), (188, 206), (121, 97), (274, 339)),
    Case(128, 16, 8192, 8192, True, (527, 489), (270, 271), (152, 120), (517, 545)),
    Case(128, 16, 16384, 16384, True, (622, 585), (296, 300), None, (668, 662)),
    Case(128, 16, 32768, 32768, True, (654, 562), (329, 322), None, (720, 601)),
    Case(128, 16, 2048, 1024, False, (238, 294), (215, 219), (132, 113), (109, 210)),
    Case(128, 16, 4096, 2048, False, (451, 446), (292, 262), (154, 125), (301, 435)),
    Case(128, 16, 8192, 4096, False, (607, 540), (330, 290), (167, 132), (520, 583)),
    Case(128, 16, 4096, 8192, False, (610, 548), (335, 299), (167, 134), (535, 590)),
    Case(128, 16, 16384, 8192, False, (646, 580), (334, 297), None, (658, 637)),
    Case(128, 16, 8192, 8192, False, (624, 566), (343, 300), (169, 136), (613, 629)),
    Case(128, 16, 32768, 16384, False, (660, 555), (340, 307), None, (694, 601)),
    Case(128, 512, 2048, 2048, True, (495, 418), (299, 255), (156, 119), (437, 466)),
    Case(128, 2048, 512, 512, True, (299, 208), (180, 156), (114, 88), (190, 225)),
    Case(128, 8192, 128, 128, True, (117, 62), (85, 59), (60, 53), (75, 70)),
)

# from the fastest on; the first that does not refuse is taken
RANKS = {
    "ampere": ("flash_attn_2", "flash", "cudnn", "triton", "efficient"),  # 8.x
    "hopper": ("flash_attn_4", "flash_attn_3", "cudnn", "flash", "triton", "efficient"),  # 9.0
    "blackwell": ("flash_attn_4", "cudnn", "flash", "triton", "efficient"),  # 10.0 and later
    "older": ("efficient",),
}


def generation(capability: tuple[int, int]) -> str:
    major = capability[0]
    return "older" if major < 8 else {8: "ampere", 9: "hopper"}.get(major, "blackwell")


class Size(NamedTuple):
    """What the choice depends on."""

    d: int
    heads: int
    rows: int
    cols: int
    causal: bool

    @property
    def tile(self) -> float:
        return log2(self.rows * self.cols)

    @property
    def work(self) -> float:
        return self.tile + log2(self.heads)


@lru_cache(maxsize=4096)
def by_speed(names: tuple[str, ...], which: Pass, size: Size, kind: str) -> tuple[str, ...]:
    """The names, the fastest first."""
    ranks = RANKS[kind]
    ranked = sorted(names, key=lambda name: ranks.index(name) if name in ranks else len(ranks))
    if kind != "hopper":
        return tuple(ranked)
    measured = _nearest(size)._asdict()
    rates: dict[str, Rate] = {name: measured[name] for name in ranked if measured.get(name) is not None}
    known = sorted(rates, key=lambda name: -rates[name][which == "backward"])
    return tuple(known + [name for name in ranked if name not in rates])


def _nearest(size: Size) -> Case:
    width = min({case.d for case in HOPPER}, key=lambda d: abs(log2(d) - log2(size.d)))
    cases = [case for case in HOPPER if case.d == width]
    return min(cases, key=lambda case: _distance(size, Size(*case[:5])))


def _distance(a: Size, b: Size) -> float:
    return abs(a.tile - b.tile) + abs(a.work - b.work) + (a.causal != b.causal)
