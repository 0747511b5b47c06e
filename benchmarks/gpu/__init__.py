"""Everything that must be shown on a GPU: ``python -m benchmarks.gpu``."""
