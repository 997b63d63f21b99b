"""Shared by benchmarks: grids of training runs, their report as a page, measurements for the documentation."""
