"""What benchmarks share: grids of training runs, their report as a page, measurements of the documentation."""
