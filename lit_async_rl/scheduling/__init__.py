"""Admission policies and the staleness bound, by counting; no threads, no clocks."""
