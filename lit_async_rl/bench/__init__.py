"""The staleness benchmark: small policies, exact lags, many seeds. See `scripts/staleness_bench.py`.

`suite` says which cells there are, `cell` trains one, `grid` trains them all and goes on where it was stopped, `table`
reads what they wrote, `statistics`, `figures` and `report` make something of it.
"""
