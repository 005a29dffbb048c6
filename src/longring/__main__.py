"""`python -m longring` is the command `longring`."""

from .cli import main

main()
