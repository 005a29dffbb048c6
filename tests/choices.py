"""What was chosen once is remembered; a test that changes what there is to choose from begins anew."""

from __future__ import annotations

from longring.geometry.tiles import Tile
from longring.kernels import recipes, select
from longring.kernels.operations.contract import Operation
from longring.kernels.recipes import Asked, Leg


def settled_recipe(operations: tuple[Operation, ...], tiles: tuple[Tile, ...], asked: Asked) -> tuple[Leg, ...]:
    """What computes a kind of call once it has come often enough to have been worth cuDNN's plans."""
    return recipes._written(operations, tiles, asked)


def forget_choices() -> None:
    select._chosen.clear()
    recipes.forget()
