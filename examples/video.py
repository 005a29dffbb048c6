"""A video as one sequence of patches, many of them lost: what the whole video knows of them.

python examples/video.py                                      # 64 frames of 16 x 16 patches, on two local ranks
python examples/video.py --lost 0.5 --frames 32
torchrun --standalone --nproc-per-node 2 examples/video.py

Attention is not causal here: a patch looks at every patch of every frame, before it and after. Queries and keys are
made of the eight patches around a place, as far as they are not lost, and a lost patch becomes what is found in the
middle of places that look like its own: non-local means (Buades et al. 2005), which is attention. LongNet's branches
look at two frames whole, at eight thinly, and at the whole video more thinly still.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor

import longring as lr
from longring.train.generated import VIDEO_VOCABULARY, video_like

SIDE = 16  # patches of a frame, down and across
FRAME = SIDE * SIDE
AROUND = [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1) if (y, x) != (0, 0)]
D, HEADS = 128, 4  # 8 x 16 numbers of a neighbourhood
SHARPNESS = 4.0


def shown(video: Tensor, is_lost: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of a video [frames, SIDE, SIDE]: around every patch, and of itself, each [1, n, 1, D]."""
    seen = torch.eye(VIDEO_VOCABULARY)[video] * ~is_lost[..., None]  # a lost patch is like none
    near = torch.stack([seen.roll((-y, -x), dims=(1, 2)) for y, x in AROUND], dim=3)  # things move around the edges
    middle = torch.nn.functional.pad(seen, (0, D - VIDEO_VOCABULARY))
    return near.reshape(1, -1, 1, D), middle.reshape(1, -1, 1, D)


def program(
    video: Tensor, is_lost: Tensor, patterns: dict[str, lr.Dense | lr.Dilated]
) -> dict[str, tuple[Tensor, float]]:
    """What each rank runs: by pattern what every patch is taken for, and seconds."""
    return {name: restored(video, is_lost, pattern) for name, pattern in patterns.items()}


def restored(video: Tensor, is_lost: Tensor, pattern: lr.Dense | lr.Dilated) -> tuple[Tensor, float]:
    began = time.perf_counter()
    s = lr.Sharding(length=video.numel(), group=dist.group.WORLD, layout="contiguous")
    heads = HEADS if isinstance(pattern, lr.Dilated) else 1  # of LongNet each keeps other patches
    around, middle = (s.shard(x).expand(-1, -1, heads, -1).contiguous() for x in shown(video, is_lost))
    out, lse = lr.attention(around, around, middle, pattern=pattern, sharding=s, scale=SHARPNESS, return_lse=True)
    weight = lse[0].T.softmax(dim=1)  # [n, heads]: all heads under one softmax
    votes = (weight[:, :, None] * out[0, :, :, :VIDEO_VOCABULARY]).sum(dim=1)  # a lost patch has none
    guess = s.unshard(votes.argmax(dim=1)[None]).reshape(video.shape)
    return guess, time.perf_counter() - began


def looks(n: int) -> dict[str, lr.Dense | lr.Dilated]:
    def frames(count: int) -> lr.Dense:
        return lr.Dense(causal=False, window=(count * FRAME, count * FRAME))

    return {
        "about its own frame": lr.Dense(causal=False, window=(FRAME // 2, FRAME // 2)),
        "4 frames each way": frames(4),
        "LongNet, all frames thinly": lr.Dilated(
            segment_lengths=[2 * FRAME, 8 * FRAME, n], dilation_rates=[1, 2, 4], causal=False
        ),
        "all frames": lr.Dense(causal=False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=64)
    parser.add_argument("--lost", type=float, default=0.4, help="share of the patches")
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()

    n = asked.frames * FRAME
    video = video_like(asked.frames, SIDE, SIDE, seed=1).reshape(-1, SIDE, SIDE)
    is_lost = torch.rand(video.shape, generator=torch.Generator().manual_seed(0)) < asked.lost
    in_things = is_lost & (video > 0)
    before = video.roll(1, dims=0)

    def share(guess: Tensor) -> str:
        right = guess == video
        return f"{right[in_things].double().mean():>19.1%} {right[is_lost].double().mean():>11.1%}"

    found = lr.launch(program, video, is_lost, looks(n), ranks=asked.ranks, backend="gloo")[0]
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"{asked.frames} frames of {SIDE} x {SIDE} patches as one sequence of {n:,}, {asked.lost:.0%} lost\n")
        print("lost patches restored from   of things that move      of all   seconds")
        print(f"{'the frame before, as it was':<28} {share(before)}")
        for name, (guess, seconds) in found.items():
            print(f"{name:<28} {share(guess)} {seconds:>9.1f}")


if __name__ == "__main__":
    main()
