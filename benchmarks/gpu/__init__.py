"""All measurements on a GPU: ``python -m benchmarks.gpu``."""
