"""Checkpoints that survive: written beside, synced, and put in place by one rename; read only when every byte is right.

    runs/a/
      lock                             who saves here; the system lets go of it when that process ends
      step-00000100/                   complete, or it would not have this name
        __0_0.distcp ... .metadata     what torch.distributed.checkpoint writes: a file for each rank, and an index
        manifest.json                  every file with its size and checksum, and what the run says about itself
        manifest.sha256                the manifest's own checksum, as sha256sum writes it
      step-00000120.saving-1f8c2e07/   being written, or left by a writer that was killed: never read

A reader runs nothing that a checkpoint holds: pickles are read as data, by `unpickling`, and tensors and plain values
are made of what they tell, after it was checked.
"""

from .claims import release, reserve
from .finding import Found, Skipped, find
from .loading import load
from .meeting import together
from .saving import save

__all__ = ["Found", "Skipped", "find", "load", "release", "reserve", "save", "together"]
