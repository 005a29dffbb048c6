"""The report: one page of HTML made from the record of a command, that asks nobody for anything."""

from .writing import write

__all__ = ["write"]
