"""Why blocks add up: the online softmax, and the dense definition that judges everything else."""
