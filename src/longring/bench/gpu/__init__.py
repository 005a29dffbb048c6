"""Every number of one GPU by one command, `python -m longring.bench.gpu`: checked, then timed, peers beside it."""
