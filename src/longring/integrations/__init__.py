"""longring inside other libraries: one file each, none of which is imported by anything else."""
