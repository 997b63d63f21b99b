"""Several training processes: which leads, how a step's data reaches all, how a dead or hanging one is noticed."""
