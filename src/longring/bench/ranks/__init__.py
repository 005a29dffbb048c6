"""Ranks in processes of this machine: our schedules, layouts and kernels beside torch and whoever else is installed."""
