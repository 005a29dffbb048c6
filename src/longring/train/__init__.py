"""The training job: long sequences, many ranks, and nothing lost."""
