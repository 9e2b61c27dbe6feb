# Two commands for people: `make demo` and `make test`. `make check` is the part of the tests without clusters.
VENV   ?= .venv
# The first Python that is new enough; PYTHON=... chooses another.
PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	$(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && echo $(p))) python3)
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
LAB    := PYTHON=$(PYTHON) docker/lab.sh

SHELL  := /bin/bash

.NOTPARALLEL:
.PHONY: help demo test check clusters bench system clean slurm-build slurm-up slurm-down slurm-shell

help:
	@echo 'make demo         an SVD on four simulated GPUs: no root, no batch system, no GPU'
	@echo 'make test         all checks and tests; as root on Debian it installs system packages (SYSTEM_DEPS=0: not)'
	@echo 'make check        the part of them without clusters'
	@echo 'make bench        the benchmarks, and their table in docs/benchmarks.md'
	@echo 'make slurm-up     a Slurm cluster in containers; slurm-shell: its login node; slurm-down: remove it'
	@echo 'make clean        remove what make made here'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'hpcgpu needs Python 3.11 or later; $(PYTHON) is older or missing. Give another: make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || \
	  { echo '$(PYTHON) has no venv. On Debian: apt-get install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo 'installing hpcgpu and what it needs into $(VENV)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' || \
	  { echo 'pip could not install the packages (its words are above). Is a package index reachable? See: $(BIN)/pip config list' >&2; exit 1; }
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/hpcgpu demo

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m "not gpu and not slurm and not mpi"

test: system check clusters

# The image first, where its steps can be seen. Exit code 3: no lab here, and its tests say so themselves. Those tests
# wait for Slurm most of the time, so the others run beside them; what they print comes last.
clusters: $(STAMP)
	@$(LAB) build || [ $$? = 3 ]
	@log=$$(mktemp); \
	  $(BIN)/python -m pytest -q -m slurm > $$log 2>&1 & \
	  $(BIN)/python -m pytest -q -m "(mpi or gpu) and not slurm"; here=$$?; \
	  wait $$!; lab=$$?; \
	  echo 'the tests on the Slurm lab:'; cat $$log; rm -f $$log; \
	  exit $$((here | lab))

system:
	@scripts/system-deps.sh

bench: $(STAMP)
	$(BIN)/python scripts/bench.py

slurm-build:
	$(LAB) build

slurm-up:
	$(LAB) up

slurm-down:
	$(LAB) down

slurm-shell:
	$(LAB) shell

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
