"""What a run says about itself in its checkpoints: checked here, before any of it is used."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..errors import ArgumentError, CheckpointError
from .checkpoints import Found
from .checkpoints.manifest import INDEX, shown
from .config import Config, usual_feedforward

SETTLED = ("context", "dim", "layers", "heads", "batch", "dtype")  # what no run leaves open
LONGEST = 10_000  # characters of a text
LARGEST = 2**63 - 1  # of the config's whole numbers
MOST = {"context": 2**40, "layers": 10_000, "seed": 2**128}  # the first two take memory before a weight is read
A_LAYER = 400  # bytes of the index, which tells of its four tensors and more


@dataclass(frozen=True)
class About:
    """A run, at one of its checkpoints.

    sequences:    how many of them its steps have used: the next one's number.
    config:       settled for the ranks that wrote it.
    corpus:       the name of its data; its fingerprint changes when the data does.
    vocabulary:   how many tokens there are.
    """

    sequences: int
    config: Config
    corpus: str
    fingerprint: str
    vocabulary: int

    @classmethod
    def of(cls, found: Found) -> About:
        """As a checkpoint has it that anyone may have written; refused where it is not what a run writes."""
        try:
            return cls(
                sequences=_whole(found.about, "sequences", 0, 2**63 - 1),
                config=_config(found.about),
                corpus=_text(found.about, "corpus"),
                fingerprint=_text(found.about, "fingerprint"),
                vocabulary=_whole(found.about, "vocabulary", 1, 2**31),
            )
        except _Wrong as why:
            raise ArgumentError(
                f"{found.path} was written by another version of longring, or by another program: {why}"
            ) from None

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "config": self.config.as_json()}

    def check_size(self, found: Found) -> None:
        """Refuse to make a model far larger than what was saved of it."""
        config = self.config
        dim, layers = config.dim or 0, config.layers or 0
        index = found.manifest.files[INDEX].bytes if found.manifest is not None else 0
        if layers * A_LAYER > index:
            raise CheckpointError(
                f"{found.path} says that its model has {layers:,} layers, but its index has {index:,} bytes, too few "
                "to tell of them"
            )
        least = self.vocabulary * dim + layers * dim * (dim + (config.feedforward or 0))
        needed = least * (8 if config.dtype == "fp64" else 4)
        if needed > found.bytes:
            raise CheckpointError(
                f"{found.path} says that its model has {least:,} weights and more, which take {needed:,} bytes, but "
                f"it has {found.bytes:,} bytes"
            )


class _Wrong(Exception):
    """What is not as a run writes it."""


def _config(told: dict[str, Any]) -> Config:
    kept = told.get("config")
    if not isinstance(kept, dict):
        raise _Wrong("it has no config")
    for name, value in kept.items():
        most = MOST.get(name, LARGEST)
        if type(value) is int and abs(value) > most:
            number = f"{value:,}" if abs(value) <= LARGEST else f"a number of {value.bit_length()} bits"
            raise _Wrong(f"in its config, {shown(name)} is {number}, and at most {most:,}")
    try:
        config = Config(**kept)
    except TypeError as error:
        raise _Wrong(f"its config has other names: {error}") from None
    except ArgumentError as error:
        raise _Wrong(f"in its config, {error}") from None
    missing = [name for name in SETTLED if getattr(config, name) is None]
    if missing:
        raise _Wrong(f"its config leaves {', '.join(missing)} open")
    if config.feedforward is None:  # as older versions did
        return replace(config, feedforward=usual_feedforward(config.model, config.dim))
    return config


def _whole(told: dict[str, Any], name: str, least: int, most: int) -> int:
    value = told.get(name)
    if type(value) is not int or not least <= value <= most:
        raise _Wrong(f"its {name} is no whole number" if name in told else f"it has no {name}")
    return value


def _text(told: dict[str, Any], name: str) -> str:
    value = told.get(name)
    if type(value) is not str or len(value) > LONGEST:
        raise _Wrong(f"its {name} is no text" if name in told else f"it has no {name}")
    return value
