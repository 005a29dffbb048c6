from . import interface

__all__ = ["interface"]
