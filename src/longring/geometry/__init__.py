"""Which tokens meet: who holds what, which pairs count, and how they are cut into tiles. Integers only."""
