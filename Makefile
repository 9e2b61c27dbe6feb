# Two commands for people: `make demo` and `make test`. `make check` is the part of the tests without clusters.
VENV   ?= .venv
# The first Python that is new enough; PYTHON=... chooses another.
PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	$(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && echo $(p))) python3)
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# distributed-ucxx pins an older Dask, and is for CUDA 12.
UCX    := .venv-ucx
# CuPy, numba and RMM on a stand-in for a driver: there alone is the part of CuPy replaced that brings NVIDIA's runtime.
CUPY   := .venv-cupy
# XGBoost, scikit-learn, xarray and others, which no test of make test needs.
LIBRARIES := .venv-libraries
LAB    := PYTHON=$(PYTHON) docker/lab.sh

# Images set it; then each Python of the tests compiles all that it imports: 1.4 CPU s for distributed alone.
unexport PYTHONDONTWRITEBYTECODE
SHELL  := /bin/bash
CORES  := $(shell nproc)
# Slurm clusters beside each other, each with its share of the tests in tests/lab: one more than cores, 4 at most:
# their tests wait two thirds of their time.
LABS   ?= $(shell echo $$(($(CORES) < 2 ? 3 : $(CORES) > 3 ? 4 : $(CORES) + 1)))
# Each test is given to the next process that is free; the slowest are named at the end.
RUN    := scripts/run_tests.py run
STEAL  := --dist worksteal --durations 40 --durations-min 5
# The verdict on the suites that ran, after a second try of what failed. `make test` has one for all, at its end.
DECIDE := $(BIN)/python scripts/run_tests.py decide
NOW    := 1
# make -n runs each line that names the variable itself, here all of a suite.
AGAIN  := $(MAKE) --no-print-directory

.NOTPARALLEL:
.PHONY: help demo test test-all labs check docs image oldest release channels clusters ucx cupy libraries bench gpu system clean slurm-build slurm-up slurm-down slurm-shell

help:
	@echo 'make demo         an SVD on four simulated GPUs: no root, no batch system, no GPU'
	@echo 'make test         all checks and tests; as root on Debian it installs system packages (SYSTEM_DEPS=0: not)'
	@echo 'make test-all     and the tests of the Slurm lab on Debian 13 and unstable; make labs DEBIANS=trixie: these alone, on one'
	@echo 'make check        the part of them without clusters (tests/unit, ruff, mypy)'
	@echo 'make docs         the documentation with the API reference, into build/docs'
	@echo 'make image        a container image from the wheel, in a bare Debian without a compiler; the demo runs in it'
	@echo 'make oldest       the demo and tests/unit with the lowest versions of all dependencies (minutes)'
	@echo 'make release      sdist, wheel, locks and bill of materials in build/release, checked; nothing is uploaded'
	@echo 'make channels     each channel that hpcgpu can come by, in a bare Debian: a row for each; SPACK_ROOT=... for Spack'
	@echo 'make ucx          the tests of protocol="ucx", in an environment of their own; no GPU is needed'
	@echo 'make cupy         CuPy, numba and RMM themselves, in an environment of their own; no GPU is needed'
	@echo 'make libraries   what people run on top: XGBoost, xarray, scikit-learn ..., in an environment of its own (minutes)'
	@echo 'make bench        the benchmarks: figures in docs/benchmarks/*.csv, and docs/benchmarks.md with charts of them'
	@echo 'make gpu          all that wants a GPU, in 9 minutes at most, and a report of it in build/gpu'
	@echo 'make slurm-up     a Slurm cluster in containers; slurm-shell: its login node; slurm-down: remove it'
	@echo 'make clean        remove what make made here'

# uv takes 7 CPU s for these packages, and pip 42. uv reads none of pip's settings: it is given those of the network, and
# where it cannot install, pip does.
SAME   := s/^[^=]*\.index-url=/UV_DEFAULT_INDEX=/p; s/^[^=]*\.no-index=/UV_NO_INDEX=/p
SAME   += ; s/^[^=]*\.proxy=/ALL_PROXY=/p; s/^[^=]*\.cert=/SSL_CERT_FILE=/p
UV     := set -a; eval "$$($(BIN)/python -m pip config list | sed -n '$(SAME)')"; $(BIN)/uv
# A comma in a word of a call.
,      := ,
define environment
	$(UV) venv --quiet --clear --seed --python $(BIN)/python $(1) || $(PYTHON) -m venv --clear $(1)
endef
define install
	$(UV) pip install --quiet --python $(1)/bin/python $(2) || \
	  $(1)/bin/python -m pip install --no-compile --quiet --disable-pip-version-check $(2)
endef

# What is imported is compiled then: most of what the packages bring never is, and pip need not.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'hpcgpu needs Python 3.11 or later; $(PYTHON) is older or missing. Give another: make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || \
	  { echo '$(PYTHON) has no venv. On Debian: apt-get install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo 'installing hpcgpu and what it needs into $(VENV) (a minute or two):'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv && \
	  $(UV) pip install --python $(BIN)/python -c constraints.txt -e '.[dev]' || { set -o pipefail; \
	  $(BIN)/python -m pip install --no-compile --progress-bar off --disable-pip-version-check -c constraints.txt \
	  -e '.[dev]' | while read -r word name rest; do case "$$word" in \
	    Collecting) printf ' %s' "$${name%%[][<>=!~;(]*}" ;; \
	    Installing) [ "$$name" != collected ] || printf '\n... all are here, and are put into place\n' ;; esac; done; } || \
	  { echo; echo 'pip could not install the packages (its words are above). Is a package index reachable? See: $(BIN)/pip config list' >&2; exit 1; }
	@echo 'installed. In your shell: . $(BIN)/activate'
	@touch $(STAMP)

# What tests import is compiled once, before several processes do so at the same time; the real OpenPBS's user cannot.
COLLECT := -m pytest --quiet --collect-only -p no:cacheprovider
$(VENV)/.compiled: $(STAMP)
	@$(BIN)/python $(COLLECT) tests/unit tests/process > /dev/null || true
	@touch $@

demo: $(STAMP)
	$(BIN)/hpcgpu demo
	@echo 'On your own: . $(BIN)/activate; hpcgpu run --gpus sim:4 examples/svd.py'

# Types beside the tests: neither keeps both cores of a small machine busy to its end.
check: $(VENV)/.compiled
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@log=$$(mktemp); \
	  $(BIN)/mypy > $$log 2>&1 & \
	  $(BIN)/python $(RUN) unit $(STEAL) -n $$(($(CORES) + 1)) tests/unit; tests=$$?; \
	  wait $$!; types=$$?; \
	  cat $$log; rm -f $$log; \
	  exit $$((tests | types))
	@[ -z "$(NOW)" ] || $(DECIDE) unit

# Sphinx comes for this alone: no test needs it. A warning is an error, and so is a name that leads nowhere.
$(VENV)/.installed-docs: $(STAMP) constraints-docs.txt
	@echo 'installing Sphinx into $(VENV) (half a minute)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -c constraints-docs.txt -e '.[docs]'
	@touch $@

docs: $(VENV)/.installed-docs
	@$(BIN)/python scripts/manpages.py build/man
	@$(BIN)/python scripts/notebooks.py build/notebooks
	@$(BIN)/python scripts/bench_page.py --check
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --nitpicky -d build/doctrees docs build/docs
	@echo 'the documentation is in build/docs; open build/docs/index.html'

# Both take minutes, and are no part of make test; .ci/run has them.
image: $(STAMP)
	scripts/packaging.sh image

oldest: $(STAMP)
	scripts/packaging.sh oldest

release: $(STAMP)
	scripts/packaging.sh release

channels: $(STAMP)
	$(BIN)/python scripts/channels.py

# The tests on the Slurm lab wait most of the time, and so do those on a real OpenPBS, where there is one, and those of
# UCX: all others run beside them, with less of the cores (nice): the kernel gives all containers together no more than
# one of their processes, and the lab came to its end last. What they print comes last. The lab's image is made while
# packages are installed, the environment of UCX, which the lab needs too, while they are compiled, that of CuPy beside
# the first tests. Where the image cannot be built, its tests say why.
test: system
	@log=$$(mktemp) pbslog=$$(mktemp) envlog=$$(mktemp); \
	  ACCOUNTING=1 $(LAB) build > /dev/null 2>&1 & \
	  $(AGAIN) $(STAMP) || exit; \
	  $(AGAIN) -k $(UCX)/.installed & ucx=$$!; \
	  trap 'kill $$ucx 2> /dev/null' EXIT; \
	  $(AGAIN) $(VENV)/.compiled && wait $$ucx || exit; \
	  $(BIN)/python $(RUN) lab --durations 40 --durations-min 5 -n $(LABS) --dist load --maxschedchunk 1 tests/lab \
	    > $$log 2>&1 & lab=$$!; \
	  $(BIN)/python $(RUN) pbs tests/pbs > $$pbslog 2>&1 & pbs=$$!; \
	  $(AGAIN) -k ucx cupy NOW= > $$envlog 2>&1 & envs=$$!; \
	  trap 'kill $$lab $$pbs $$envs 2> /dev/null' EXIT; \
	  nice -n 5 $(AGAIN) -k check clusters NOW=; here=$$?; \
	  wait $$envs; here=$$((here | $$?)); \
	  echo 'the tests of UCX and CuPy:'; cat $$envlog; rm -f $$envlog; \
	  wait $$pbs; real=$$?; \
	  echo 'the tests on a real OpenPBS:'; cat $$pbslog; rm -f $$pbslog; \
	  wait $$lab; there=$$?; \
	  echo 'the tests on the Slurm lab:'; cat $$log; rm -f $$log; \
	  $(DECIDE) unit process ucx cupy lab pbs; tests=$$?; \
	  exit $$((here | there | real | tests))

# Slurm 24.11 with Python 3.13, and 26.05 with 3.14, one after the other: each cluster of containers wants a core.
test-all: export DEBIANS := bookworm trixie sid
test-all: test labs

labs: export DEBIANS ?= trixie sid
labs: system
	@$(AGAIN) $(STAMP) || exit; failed=0; for debian in $(filter-out bookworm,$(DEBIANS)); do export DEBIAN=$$debian; \
	  echo "the Slurm lab on Debian $$debian"; ACCOUNTING=1 $(LAB) build || true; \
	  $(BIN)/python $(RUN) lab --durations 40 --durations-min 5 -n $(LABS) --dist load --maxschedchunk 1 tests/lab && \
	    $(DECIDE) lab || failed=1; \
	done; exit $$failed

# Each of these starts several processes, and waits for them now and then: two more of them than cores. With one more,
# two cores had nothing to do for a fifth of the time once the lab was done.
clusters: $(VENV)/.compiled
	$(BIN)/python $(RUN) process $(STEAL) -n $$(( $(CORES) < 7 ? $(CORES) + 2 : 8 )) tests/process tests/gpu
	@[ -z "$(NOW)" ] || $(DECIDE) process

$(UCX)/.installed: $(STAMP) constraints-ucx.txt
	@$(call environment,$(UCX))
	@echo 'installing hpcgpu with UCX into $(UCX)'
	@grep -vE '^(dask|distributed|cuda-bindings)==' constraints.txt | cat - constraints-ucx.txt > $(UCX)/constraints.txt
	@$(call install,$(UCX),-c $(UCX)/constraints.txt -e '.[ucx$(,)mpi-runtime]' hypothesis pytest pytest-timeout pytest-xdist)
	@$(UCX)/bin/python $(COLLECT) tests/ucx > /dev/null || true
	@touch $@

$(CUPY)/.installed: $(STAMP) constraints-cupy.txt tests/support/real_cupy.py tests/support/fakert.c
	@$(call environment,$(CUPY))
	@echo 'installing CuPy, numba and RMM into $(CUPY), and CuPy without its runtime (half a minute)'
	@$(call install,$(CUPY),-c constraints.txt -c constraints-cupy.txt \
	  -e . cuda-core cupy-cuda13x numba-cuda rmm-cu13 hypothesis pytest pytest-timeout pytest-xdist \
	  cython setuptools nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl nvidia-cuda-profiler-api)
	@$(call install,$(CUPY),--no-deps -c constraints-cupy.txt cudf-cu13)
	$(CUPY)/bin/python tests/support/real_cupy.py
	@$(CUPY)/bin/python $(COLLECT) tests/cupy > /dev/null || true
	@touch $@

# PyTorch without CUDA is in an index of its own; where that cannot be reached, PyPI's brings CUDA's libraries (5 GB).
$(LIBRARIES)/.installed: $(STAMP) constraints-libraries.txt
	@$(call environment,$(LIBRARIES))
	@echo 'installing XGBoost, scikit-learn, xarray, Optuna, JAX and PyTorch into $(LIBRARIES)'
	@$(call install,$(LIBRARIES),-c constraints.txt -c constraints-libraries.txt -e '.[mpi-runtime]' jax joblib optuna \
	  pandas pyarrow scikit-learn xarray xgboost-cpu zarr hypothesis pytest pytest-timeout pytest-xdist)
	@$(call install,$(LIBRARIES),--no-deps -c constraints-libraries.txt cudf-polars-cu12)
	@$(UV) pip install --quiet --python $(LIBRARIES)/bin/python --torch-backend cpu -c constraints-libraries.txt torch || \
	  { echo 'its index cannot be reached: PyTorch with CUDA, from PyPI'; \
	  $(call install,$(LIBRARIES),-c constraints.txt -c constraints-libraries.txt torch); }
	@touch $@

ucx: $(UCX)/.installed
	$(UCX)/bin/python $(RUN) ucx -n 2 --dist loadscope --durations 10 --durations-min 5 tests/ucx
	@[ -z "$(NOW)" ] || $(UCX)/bin/python scripts/run_tests.py decide ucx

cupy: $(CUPY)/.installed
	$(CUPY)/bin/python $(RUN) cupy -n 2 --dist loadfile --durations 10 --durations-min 5 tests/cupy
	@[ -z "$(NOW)" ] || $(CUPY)/bin/python scripts/run_tests.py decide cupy

libraries: $(LIBRARIES)/.installed
	$(LIBRARIES)/bin/python $(RUN) libraries --durations 10 --durations-min 5 tests/libraries
	@[ -z "$(NOW)" ] || $(LIBRARIES)/bin/python scripts/run_tests.py decide libraries

system:
	@scripts/system-deps.sh

bench: $(STAMP) $(VENV)/.installed-docs $(UCX)/.installed $(CUPY)/.installed
	$(BIN)/python scripts/bench.py
	$(BIN)/python scripts/bench_page.py

# It says itself what failed (exit code 1) and what was not done for want of a GPU (3).
gpu: $(STAMP)
	PYTHON=$(BIN)/python scripts/gpu.sh

slurm-build:
	$(LAB) build

slurm-up:
	$(LAB) up

slurm-down:
	$(LAB) down

slurm-shell:
	$(LAB) shell

clean:
	rm -rf $(VENV) $(UCX) $(CUPY) $(LIBRARIES) .gpu-wheels .gpu-site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
