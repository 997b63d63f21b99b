"""Tools beside training: a planner, conversion of configurations, downloads, grading, tapes, public benchmarks."""
