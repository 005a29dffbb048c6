"""For anyone who tests attention, ours or another's: the oracle, error budgets, virtual ranks, conformance."""

from ..transport.loopback import run_ranks
from .budgets import Verdict, budgets, judge, relative_error
from .conformance import Case, Finding, Report, conformance
from .oracle import Result, oracle

__all__ = [
    "Case",
    "Finding",
    "Report",
    "Result",
    "Verdict",
    "budgets",
    "conformance",
    "judge",
    "oracle",
    "relative_error",
    "run_ranks",
]
