"""Fused attention as others offer it: one file for each library, one contract for all."""
