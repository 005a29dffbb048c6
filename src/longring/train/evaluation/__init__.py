"""Judging what a run learned: does the far context help, and is what was planted there found?"""
