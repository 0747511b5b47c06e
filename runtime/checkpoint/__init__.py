"""Checkpoints on disk: complete or not there, and never code."""
