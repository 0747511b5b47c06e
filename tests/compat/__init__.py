"""Models and recipes of others against each way into the runtime: ``python -m tests.compat``."""
