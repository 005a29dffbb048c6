"""python -m longring.bench.gpu [--only NAME ...] [--quick] [--peers DIR] [--out FILE]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from ..records import Row
from .contest import Stage
from .given import Place
from .scenarios import SCENARIOS, gpu_record, run_scenarios
from .sizes import FULL, QUICK
from .tables import TITLES, plain, plain_goals


def main(arguments: list[str] | None = None) -> int:
    """0: all was right; 1: something of ours failed, and the record says what; 2: nothing was measured, and why."""
    options = _options(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("longring.bench.gpu measures a CUDA device, and torch sees none here\n")
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    stage = Stage(Place(device, torch.bfloat16), QUICK if options.quick else FULL, options.peers)
    given = sys.argv[1:] if arguments is None else arguments
    record = gpu_record(" ".join(["python -m longring.bench.gpu", *given]), device, options.quick)
    record.commit = options.commit or record.commit
    if options.only and options.out.exists():
        if not record.continues(options.out):
            sys.stderr.write(f"{options.out} is a record of other code or of another machine: say another --out\n")
            return 2
        sys.stdout.write(f"continuing {options.out}, which has {', '.join(record.scenarios)}\n")
        stage.missing, stage.failures = record.missing, record.failures

    def tell(name: str, rows: list[Row]) -> None:
        sys.stdout.write(f"\n{TITLES[name]} ({record.seconds[name]:.0f} s)\n{plain(rows)}")
        sys.stdout.flush()
        record.save(options.out)

    run_scenarios(stage, record, options.only or list(SCENARIOS), tell, lambda: record.save(options.out))
    record.is_complete = True
    record.save(options.out)
    sys.stdout.write(f"\nGoals\n{plain_goals(record)}")
    for note in (*record.missing, *(f"FAILED: {failure}" for failure in record.failures)):
        sys.stdout.write(f"{note}\n")
    sys.stdout.write(f"written to {options.out}\n")
    return 1 if record.failures else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m longring.bench.gpu", description="Every number of one GPU.")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(SCENARIOS), help=", ".join(SCENARIOS))
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument(
        "--peers", type=Path, metavar="DIR", help="clones of torchscale, dilated-attention-pytorch, einops"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", default=Path("out/gpu.json"))
    parser.add_argument("--commit", help="of this code, for a copy that has no history")
    options = parser.parse_args(arguments)
    if options.peers is not None and not options.peers.is_dir():
        parser.error(f"--peers {options.peers} is no folder")
    return options


if __name__ == "__main__":
    sys.exit(main())
