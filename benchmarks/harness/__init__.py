"""What the benchmarks share: measuring, models, loops, processes."""
