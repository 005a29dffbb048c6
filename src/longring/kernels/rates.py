"""Which operation is the fastest for a stack, by measurement.

The cases were measured on one H200 (torch 2.11.0, cuDNN 9.19, flash-attn-4 4.0.0b36; bfloat16, medians of five, by
benchmarks/rates.py), in TFLOP/s of the pairs that are kept and of the device's time alone. Those of flash-attn 3 are of
another day, when the device was slower, beside cuDNN: they are told as many times cuDNN's of here as they were of
cuDNN's then (docs/records/flash_attn_3.txt), so that of flash-attn 3 and 4 it is not known to a few hundredths who is
ahead. A stack goes by the case nearest to it in work and in the size of its tiles: small differences between cases may
be noise, and then it does not matter which is taken. Generations that nobody measured go by rank, and operations that
nobody did stand behind all that rank before them.
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
    flash_attn_4: Rate
    flash_attn_3: Rate
    cudnn: Rate
    flash: Rate
    efficient: Rate


MEASURED = Case._fields[5:]

HOPPER = (
    Case(64, 16, 256, 256, True, (13, 22), (10, 16), (14, 14), (11, 13), (8, 9)),
    Case(64, 16, 512, 512, True, (42, 64), (34, 54), (45, 45), (30, 36), (19, 21)),
    Case(64, 16, 1024, 1024, True, (109, 164), (94, 144), (126, 118), (84, 91), (39, 39)),
    Case(64, 16, 2048, 2048, True, (276, 260), (254, 337), (213, 198), (133, 137), (66, 57)),
    Case(64, 16, 4096, 4096, True, (394, 387), (393, 456), (315, 299), (171, 197), (88, 77)),
    Case(64, 16, 8192, 8192, True, (509, 503), (512, 556), (396, 386), (249, 240), (108, 89)),
    Case(64, 16, 16384, 16384, True, (569, 592), (543, 571), (451, 452), (281, 276), (122, 96)),
    Case(64, 16, 32768, 32768, True, (601, 607), (573, 546), (483, 417), (307, 284), (131, 97)),
    Case(64, 8192, 128, 128, True, (60, 67), (88, 63), (110, 55), (79, 50), (59, 70)),
    Case(64, 2048, 512, 512, True, (186, 221), (235, 198), (264, 171), (157, 140), (100, 81)),
    Case(64, 512, 2048, 2048, True, (394, 435), (426, 413), (403, 332), (270, 226), (123, 97)),
    Case(64, 128, 2048, 2048, True, (370, 400), (394, 409), (363, 309), (241, 212), (114, 91)),
    Case(64, 16, 1024, 512, False, (162, 163), (136, 149), (172, 126), (124, 94), (67, 43)),
    Case(64, 16, 2048, 1024, False, (254, 388), (234, 365), (318, 308), (233, 217), (111, 78)),
    Case(64, 16, 4096, 2048, False, (416, 476), (409, 468), (412, 390), (272, 258), (121, 77)),
    Case(64, 16, 8192, 4096, False, (476, 549), (464, 542), (453, 447), (293, 276), (127, 96)),
    Case(64, 16, 4096, 8192, False, (488, 553), (484, 536), (455, 452), (296, 279), (125, 99)),
    Case(64, 16, 16384, 8192, False, (556, 584), (542, 562), (477, 473), (303, 285), (131, 100)),
    Case(64, 16, 8192, 16384, False, (520, 586), (515, 563), (477, 475), (305, 286), (129, 106)),
    Case(64, 16, 8192, 8192, False, (500, 572), (496, 556), (463, 464), (297, 283), (128, 103)),
    Case(64, 16, 32768, 16384, False, (599, 595), (574, 554), (490, 465), (308, 285), (135, 105)),
    Case(64, 512, 512, 512, False, (290, 317), (307, 298), (353, 262), (240, 196), (116, 99)),
    Case(128, 16, 256, 256, True, (25, 34), (19, 28), (23, 24), (16, 20), (18, 13)),
    Case(128, 16, 512, 512, True, (75, 89), (65, 79), (72, 67), (40, 49), (44, 30)),
    Case(128, 16, 1024, 1024, True, (202, 216), (191, 196), (195, 170), (105, 115), (73, 62)),
    Case(128, 16, 2048, 2048, True, (450, 316), (451, 410), (318, 261), (160, 162), (105, 78)),
    Case(128, 16, 4096, 4096, True, (582, 471), (611, 542), (454, 396), (211, 228), (132, 103)),
    Case(128, 16, 8192, 8192, True, (683, 600), (763, 611), (576, 510), (288, 276), (152, 120)),
    Case(128, 16, 16384, 16384, True, (731, 690), (762, 674), (644, 595), (326, 318), (170, 131)),
    Case(128, 16, 32768, 32768, True, (747, 709), (766, 653), (665, 583), (344, 293), (173, 132)),
    Case(128, 8192, 128, 128, True, (104, 77), (130, 78), (136, 66), (92, 61), (64, 55)),
    Case(128, 2048, 512, 512, True, (289, 256), (388, 240), (381, 227), (202, 165), (124, 92)),
    Case(128, 512, 2048, 2048, True, (564, 509), (637, 492), (574, 443), (313, 261), (161, 122)),
    Case(128, 128, 2048, 2048, True, (538, 483), (618, 472), (521, 414), (282, 246), (153, 116)),
    Case(128, 16, 1024, 512, False, (309, 219), (261, 205), (275, 182), (183, 117), (130, 62)),
    Case(128, 16, 2048, 1024, False, (493, 456), (496, 447), (490, 395), (291, 253), (153, 123)),
    Case(128, 16, 4096, 2048, False, (609, 571), (627, 558), (592, 505), (325, 281), (164, 130)),
    Case(128, 16, 8192, 4096, False, (702, 658), (711, 638), (663, 574), (351, 297), (171, 135)),
    Case(128, 16, 4096, 8192, False, (726, 661), (736, 640), (671, 584), (351, 304), (170, 137)),
    Case(128, 16, 16384, 8192, False, (738, 693), (748, 670), (684, 602), (359, 306), (174, 135)),
    Case(128, 16, 8192, 16384, False, (750, 695), (747, 678), (687, 609), (360, 312), (174, 138)),
    Case(128, 16, 8192, 8192, False, (734, 683), (740, 660), (679, 596), (356, 306), (173, 137)),
    Case(128, 16, 32768, 16384, False, (758, 675), (765, 600), (696, 544), (353, 285), (175, 133)),
    Case(128, 512, 512, 512, False, (434, 357), (510, 357), (506, 336), (287, 219), (152, 120)),
)

# from the fastest on; the first that does not refuse is taken
RANKS = {
    "ampere": ("flash_attn_2", "flash", "cudnn", "efficient", "triton"),  # 8.x
    "hopper": ("flash_attn_4", "flash_attn_3", "cudnn", "flash_attn_2", "flash", "efficient", "triton"),  # 9.0
    "blackwell": ("flash_attn_4", "cudnn", "flash_attn_2", "flash", "efficient", "triton"),  # 10.0 and later
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

    @property
    def flops(self) -> float:
        """Of a forward, about."""
        return 4 * self.heads * self.rows * self.cols * self.d / (2 if self.causal else 1)


PLANNED = "cudnn"  # it makes a plan for every new shape and layout, 50 ms to a second on an H200
UNPLANNED = ("flash_attn_4", "flash_attn_3", "flash_attn_2", "flash", "efficient")
WORTH_A_PLAN = (
    4e9  # FLOPs: below, a plan saves 20 us of a forward and 30 of a backward, and of small tiles there are many kinds
)


SAVED = 1.05  # times as fast at least: what an operation is that spares a pass over its results, of 2,048 rows


def by_speed(
    names: tuple[str, ...], which: Pass, size: Size, kind: str, sparing: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """The names, the fastest first; of little work, what needs no plan before what does.

    `sparing`: those whose results need not be moved afterwards.
    """
    ranks = RANKS[kind]
    ranked = sorted(names, key=lambda name: _rank(name, ranks))
    if kind == "hopper":
        ranked = _as_measured(ranked, which, size, sparing)
    unplanned = [name for name in ranked if name in UNPLANNED]
    if PLANNED in ranked and unplanned and size.flops < WORTH_A_PLAN:
        ranked.remove(PLANNED)
        ranked.insert(ranked.index(unplanned[0]) + 1, PLANNED)
    return tuple(ranked)


def _as_measured(ranked: list[str], which: Pass, size: Size, sparing: tuple[str, ...]) -> list[str]:
    ranks = RANKS["hopper"]
    measured = _nearest(size)._asdict()
    rates: dict[str, Rate] = {name: measured[name] for name in ranked if measured.get(name) is not None}
    known = sorted(rates, key=lambda name: -rates[name][which == "backward"] * (SAVED if name in sparing else 1))
    for name in (name for name in ranked if name not in rates):
        better = [i for i, other in enumerate(known) if _rank(other, ranks) < _rank(name, ranks)]
        known.insert(max(better, default=-1) + 1, name)
    return known


def _rank(name: str, ranks: tuple[str, ...]) -> int:
    return ranks.index(name) if name in ranks else len(ranks)


@lru_cache(maxsize=4096)
def _nearest(size: Size) -> Case:
    width = min({case.d for case in HOPPER}, key=lambda d: abs(log2(d) - log2(size.d)))
    here = _Point(size.tile, size.work, size.causal)
    return min(_points(width), key=lambda point: _distance(here, point[0]))[1]


class _Point(NamedTuple):
    """Where a size lies among the measured ones."""

    tile: float
    work: float
    causal: bool


@lru_cache
def _points(width: int) -> list[tuple[_Point, Case]]:
    cases = [(Size(*case[:5]), case) for case in HOPPER if case.d == width]
    return [(_Point(size.tile, size.work, size.causal), case) for size, case in cases]


def _distance(a: _Point, b: _Point) -> float:
    return abs(a.tile - b.tile) + abs(a.work - b.work) + (a.causal != b.causal)


# ------------------------------------------------------------------------------------ launches, and many at once


class Cost(NamedTuple):
    """Seconds that a launch takes of the host, and of the device; the longest that one program of it takes alone."""

    host: float
    device: float
    longest: float = 0.0


# of the host, forward and backward, with what is done around the call. By the wall clock a stack took 130 to 250 and
# 200 to 400 us with flash-attn-4 (a hundred documents; LongNet), of which the call itself is 90 to 120, both ways; of
# others it is 20 to 40 and 40 to 80, of ours 75 to 140 and 210 to 240 (docs/records/calls.txt). The forward's are taken
# at the low end: what one waits for in a model is more often the device
CALLS = {"flash_attn_4": (120e-6, 250e-6), "flash_attn_3": (90e-6, 200e-6), "flash_attn_2": (90e-6, 200e-6)}
CALL = 70e-6, 200e-6
CALL_OF_MANY = 120e-6, 350e-6  # of ours
CALL_OF_A_COPY = 8e-6
COPIED = 2.5e12  # bytes per second, of those that are read and written when a tensor is turned round, or merged

# what is done with many stacks at once, and with bands, in TFLOP/s of whole blocks and of two more for each item: with
# these one number is near to all that was measured, documents and windows, short ones and long ones; by head dimension.
# Those of flash-attn-4 were measured under full load, and are told here as fast as the cases above were found. Of its
# times in docs/records/h200.json flash-attn 3 took 0.83 to 1.03 forward and 0.95 to 1.14 backward on the same day
OF_MANY = {
    "flash_attn_4": {64: (590, 580), 128: (735, 685)},
    "flash_attn_3": {64: (620, 560), 128: (765, 665)},
    "flash": {64: (240, 285), 128: (355, 325)},
    "triton": {64: (345, 310), 128: (470, 395)},
}
BLOCK = 128
OF_AN_ITEM = 2
PROGRAMS = 132  # at a time
# how fast, about, beside the generation that was measured: others' operations, and ours, which was tuned for that one
GENERATIONS = {"hopper": (1.0, 1.0), "blackwell": (1.5, 1.0), "ampere": (0.4, 0.25), "older": (0.1, 0.05)}
OURS = "triton"
SECOND = ("flash_attn_2", "flash")  # flash-attn 2, which is one, and knows of nothing that came after Ampere


def cost_alone(name: str, which: Pass, size: Size, kind: str, *, copies: int = 0) -> Cost:
    """Of a launch for one stack, with so many tensors copied for it or after it."""
    backward = which == "backward"
    size = size._replace(rows=max(size.rows, BLOCK), cols=max(size.cols, BLOCK))  # what is less takes as long
    rate = (
        getattr(_nearest(_in_blocks(size)), name if name in MEASURED else "flash")[backward]
        * 1e12
        * _factor(name, kind)
    )
    work = size.flops * (2.5 if backward else 1)
    copied = copies * size.heads * size.rows * size.d * 2 * 2 / COPIED
    return Cost(CALLS.get(name, CALL)[backward] + copies * CALL_OF_A_COPY, work / rate + copied)


def cost_together(name: str, which: Pass, size: Size, kind: str) -> Cost:
    """Of a stack in a launch of many."""
    return _cost_of_blocks(name, which, _in_blocks(size), kind)


def _in_blocks(size: Size) -> Size:
    """In whole blocks: of documents that are new at every step, few sizes remain, and what is known of them."""
    return size._replace(rows=-(-size.rows // BLOCK) * BLOCK, cols=-(-size.cols // BLOCK) * BLOCK)


@lru_cache(maxsize=4096)
def _cost_of_blocks(name: str, which: Pass, size: Size, kind: str) -> Cost:
    backward = which == "backward"
    known = OF_MANY.get("flash" if name in SECOND else name, OF_MANY[OURS])
    rate = known[64 if size.d <= 64 else 128][backward] * 1e12 * _factor(name, kind)
    high, wide = size.rows // BLOCK, size.cols // BLOCK
    blocks = high * (high + 1) // 2 if size.causal else high * wide
    each = (10 if backward else 4) * BLOCK * BLOCK * size.d / rate
    host = (CALL_OF_MANY if name == OURS else CALLS.get(name, CALL))[backward]
    return Cost(host, size.heads * (blocks + OF_AN_ITEM * high) * each, (wide + OF_AN_ITEM) * each * PROGRAMS)


def _factor(name: str, kind: str) -> float:
    others, ours = GENERATIONS[kind]
    return ours if name == OURS else min(1.0, others) if name in SECOND else others


def cost_of_merging(which: Pass, numbers: int, kind: str) -> float:
    """Seconds of the device, of a pass over a result of so many numbers, or over the three of a backward."""
    read_and_written = 6 * numbers * (3 if which == "backward" else 1)
    return read_and_written / (COPIED * GENERATIONS[kind][1])
