"""All checks and measurements on a GPU: ``python -m benchmarks.gpu``."""
