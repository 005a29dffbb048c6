"""What to run first on a cluster: is attention exact there, how fast are its links, are faults noticed in time."""
