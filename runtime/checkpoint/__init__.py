"""Checkpoints on disk: atomic writes, and reading that executes no code."""
