"""Time to accuracy: how much sooner asynchronous training reaches the accuracies of synchronous training.

`suite` defines the runs, `cell` trains one and measures its snapshots afterwards, `benchmarks.common` trains all
and resumes what was interrupted, `curves` reads their results, and `statistics`, `figures` and `report` evaluate them.
"""
