"""The staleness benchmark: small policies, exact lags, many seeds. See `scripts/staleness_bench.py`.

`suite` says which cells there are, `cell` trains one, `grid` trains them all and goes on where it was stopped, `table`
reads what they wrote, `statistics`, `figures` and `report` make something of it.
"""

from importlib.util import find_spec

for _name in ("matplotlib", "pandas", "scipy"):
    if find_spec(_name) is None:
        raise ModuleNotFoundError(
            f"the staleness benchmark needs {_name}: pip install 'lit-async-rl[plots]'", name=_name
        )
