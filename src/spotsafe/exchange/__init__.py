"""Checkpoints of other kinds: reading them without running their code, and writing them."""
