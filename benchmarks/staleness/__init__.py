"""Staleness benchmark: small policies, exact lags, many seeds. See `scripts/staleness_bench.py`.

`suite` defines the cells, `cell` trains one, `grid` trains all of them and resumes an interrupted grid, `table`
collects their results, and `statistics`, `figures` and `report` evaluate them.
"""

from importlib.util import find_spec

for _name in ("matplotlib", "pandas", "scipy"):
    if find_spec(_name) is None:
        raise ModuleNotFoundError(
            f"the staleness benchmark needs {_name}: pip install 'lit-async-rl[plots]'", name=_name
        )
