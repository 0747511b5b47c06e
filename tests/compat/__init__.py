"""Models and recipes of other projects with each API of the runtime: ``python -m tests.compat``."""
