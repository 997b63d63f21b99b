"""What the benchmarks that train grids of runs share."""
