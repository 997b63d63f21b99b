# Two commands for a fresh machine: `make quickstart` and `make test`. Each makes or reuses .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: quickstart test check lint types wheel clean

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "torch>=2.11,<2.14" $(TORCH_INDEX)
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

quickstart: $(VENV)/installed  ## train the shipped policy, asynchronously, on the CPU
	$(BIN)/python scripts/train.py --config configs/quickstart.yaml

test: $(VENV)/installed  ## all tests, on the CPU
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(VENV)/installed lint types  ## what to run before a commit
	$(BIN)/python -m pytest -n 2 -m "not slow"

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

wheel: $(VENV)/installed  ## build the wheel and try it outside the repository
	bash .ci/wheel

clean:
	rm -rf $(VENV) dist build
