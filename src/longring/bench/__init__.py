"""What it did cost: runs measured, judged and drawn."""
