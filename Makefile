# Every command of a developer. `make` alone lists them.
# Needs make and Python 3.11 or newer; everything else goes into .venv.

PYTHON ?= python3
FALLBACKS := python3.13 python3.12 python3.11
SEEDS ?= 1000
WORKERS ?= 2
SYSTEM_WORKERS ?= 3
# What starts real systems mostly waits: so many files at a time, beside all else, which takes what is left of the cores.
SYSTEMS := tests/e2e tests/chaos tests/valence tests/security
COMPOSE := tests/compose/test_images.py tests/compose/test_up.py
# Five processes share the cores: one thread each, which sleeps when idle. Memory is not taken in huge pages: for
# each the kernel may have to move others away first.
QUIET = env OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive NUMPY_MADVISE_HUGEPAGE=0
PYTEST = $(QUIET) $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder
NAME ?= http
WHAT ?= all
BIN := .venv/bin
STAMP := .venv/.installed
# Images of Python set it, and pip compiles nothing here: each of a thousand processes compiled all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup serve chat test test-systems test-units test-long test-compose check fmt sim fuzz bench lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## make or renew .venv

$(STAMP): pyproject.toml constraints.txt valence/bootstrap.py
	@for python in $(PYTHON) $(FALLBACKS); do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    $$python -I valence/bootstrap.py && touch $@ && exit 0 || exit 1; \
	  fi; \
	done; \
	echo "Valence needs Python 3.11 or newer, and '$(PYTHON)' is not one (have: $$($(PYTHON) --version 2>&1 || true))." >&2; \
	echo "Install it, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1

serve: $(STAMP) ## serve in the foreground [MODEL= PORT= DEVICE= SET="a.b=c ..."]
	@exec $(BIN)/valence serve $(if $(MODEL),--model '$(MODEL)') $(if $(PORT),--port '$(PORT)') \
	  $(if $(DEVICE),--device '$(DEVICE)') $(foreach setting,$(SET),--set '$(setting)')

chat: $(STAMP) ## talk to the running server
	@exec $(BIN)/valence chat

test: $(STAMP) ## tests that need no GPU: those with real systems, and all else beside them [WORKERS= SYSTEM_WORKERS= ARGS=]
	@$(MAKE) --no-print-directory -j 2 test-systems test-units

test-systems: $(STAMP)
	$(PYTEST) -m "not long" -n $(SYSTEM_WORKERS) $(SYSTEMS) $(ARGS)

test-units: $(STAMP)
	nice -n 2 $(PYTEST) -m "not long" -n $(WORKERS) tests $(addprefix --ignore=,$(SYSTEMS) $(COMPOSE)) $(ARGS)

test-long: $(STAMP) ## what takes longer: all kernels compiled for all GPUs, many simulated lives, more deaths [ARGS=]
	$(QUIET) $(BIN)/python -m pytest -m long tests $(addprefix --ignore=,$(COMPOSE)) $(ARGS)
	$(BIN)/python -m tests.sim --first 200 --seeds 800

test-compose: $(STAMP) ## images and docker compose up with a real daemon, for minutes [COMPOSE_TEST_DATA=folder for layers, kept ARGS=]
	$(BIN)/python -m pytest $(COMPOSE) $(ARGS)

check: $(STAMP) ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: $(STAMP) ## format, and repair what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

sim: $(STAMP) ## simulate the scheduler [SEEDS=1000]
	$(BIN)/python -m tests.sim --seeds $(SEEDS)

fuzz: $(STAMP) ## fuzz what others send [WHAT=all ARGS="--budget N --seed S"]
	$(BIN)/python -m tests.fuzz $(WHAT) $(ARGS)

bench: $(STAMP) ## one benchmark [NAME=http ARGS="--json OUT"]
	$(BIN)/python -m benchmarks.$(NAME) $(ARGS)

lock: $(STAMP) ## write the installed versions to constraints.txt
	$(BIN)/python valence/bootstrap.py --lock

clean: ## remove .venv and caches
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
