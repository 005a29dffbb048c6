"""What every rank did when, and what it held meanwhile: recorded, put on one clock, drawn."""
