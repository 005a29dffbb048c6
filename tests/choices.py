"""What was chosen once is remembered; a test that changes what there is to choose from begins anew."""

from __future__ import annotations

from longring.kernels import recipes, select


def forget_choices() -> None:
    select._chosen.clear()
    recipes.forget()
