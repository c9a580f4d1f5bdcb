# Three commands do everything on a machine that has only Python 3.11+, pip and make:
#   make demo    the comparison of pull, push and pushkv
#   make test    all tests but those on real servers
#   make e2e     the tests on NIXL, torch and real vLLM servers (no GPU needed; Python 3.11 or 3.12, 7 GB of packages)
# They set up .venv (and .venv-e2e) themselves, once. PYTHON=python3.12 picks another interpreter; PIP_* settings are honoured.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.pushkv-ready
EXTRAS := dev router plot parquet progress
comma := ,
space := $(subst ,, )
PYTEST_ARGS ?= -n auto
FAST_VENV := .venv-fast
FAST_STAMP := $(FAST_VENV)/.pushkv-ready
E2E_VENV := .venv-e2e
E2E_STAMP := $(E2E_VENV)/.pushkv-ready
E2E_ARGS ?=
REFERENCE_ARGS ?= -n 2
LIBFABRIC ?= build/libfabric
SEEDS ?= 0:20000
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test fast coverage explore e2e serve-demo lint format lock clean

help:
	@echo "make demo    compare pull, push and pushkv, beside measurements"
	@echo "make test    run all tests"
	@echo "make fast    simulator and explorer compiled, in $(FAST_VENV): same results, twice as fast (needs a C compiler)"
	@echo "make coverage  every branch of the protocol and the planner, or fail"
	@echo "make explore play random seeds ($(SEEDS)) against the properties of the protocol"
	@echo "make e2e     run the tests on NIXL, torch and real vLLM servers (E2E_ARGS=... goes to pytest)"
	@echo "make serve-demo  hand a prompt over between two real vLLM servers"
	@echo "make lint    ruff and mypy --strict"
	@echo "make format  let ruff rewrite the sources"
	@echo "make lock    renew uv.lock"
	@echo "make clean   remove what the others made"

setup: $(STAMP)

# 1. a virtual environment, also where the system Python has no ensurepip (Debian without python3-venv);
# 2. the locked versions through uv; where uv cannot (an own index, no wheel for this machine), pip with the lower bounds.
$(STAMP): pyproject.toml uv.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "pushkv needs Python 3.11 or newer; try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "setting up $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || $(PYTHON) -m venv --clear --without-pip $(VENV)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m pip --python $(BIN)/python install --quiet pip
	@{ test -z "$$PIP_INDEX_URL$$PIP_NO_INDEX" && $(BIN)/python -m pip install --quiet uv && \
	   SSL_CERT_FILE="$${SSL_CERT_FILE:-$$PIP_CERT}" UV_HTTP_TIMEOUT="$${UV_HTTP_TIMEOUT:-$${PIP_DEFAULT_TIMEOUT:-60}}" \
	   VIRTUAL_ENV= UV_PYTHON_DOWNLOADS=never UV_PROJECT_ENVIRONMENT=$(VENV) \
	   $(BIN)/uv sync --quiet --frozen --inexact $(addprefix --extra ,$(EXTRAS)); } || \
	 { echo "uv could not install the locked versions; using pip" >&2; \
	   $(BIN)/python -m pip install --quiet -e '.[$(subst $(space),$(comma),$(EXTRAS))]'; }
	@touch $@

demo: $(STAMP)
	@$(BIN)/python experiments/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Not editable: compiled modules beside the sources would be taken for them, however the sources change.
$(FAST_STAMP): setup.py pyproject.toml $(wildcard model/*/*.py sim/*.py sim/explore/*.py) | $(STAMP)
	@echo "setting up $(FAST_VENV) (compiles for minutes)"
	@test -x $(FAST_VENV)/bin/python || $(PYTHON) -m venv $(FAST_VENV) >/dev/null 2>&1 || \
	  $(PYTHON) -m venv --clear --without-pip $(FAST_VENV)
	@$(BIN)/python -m pip --python $(FAST_VENV)/bin/python install --quiet 'setuptools>=77' mypy '.[plot,parquet,progress]'
	@rm -rf build/lib.* build/sources  # a module that is not compiled any more would be taken from there
	@PUSHKV_COMPILE=1 $(BIN)/python -m pip --python $(FAST_VENV)/bin/python install --quiet --no-build-isolation --no-deps \
	  --force-reinstall .
	@touch $@

fast: $(FAST_STAMP)
	PUSHKV_FAST=$(FAST_VENV)/bin/python $(BIN)/python -m pytest tests/sim/test_compiled.py

# vLLM's pins need overrides, which pip does not have: this one needs uv.
$(E2E_STAMP): pyproject.toml tests/e2e/requirements.txt tests/e2e/overrides.txt | $(STAMP)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || \
	  { echo "vLLM for CPUs needs Python 3.11 or 3.12; try: make PYTHON=python3.12 e2e" >&2; exit 1; }
	@echo "setting up $(E2E_VENV) (7 GB)"
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	@test -x $(E2E_VENV)/bin/python || $(BIN)/uv venv --quiet --python "$$(command -v $(PYTHON))" $(E2E_VENV)
	@SSL_CERT_FILE="$${SSL_CERT_FILE:-$$PIP_CERT}" UV_HTTP_TIMEOUT="$${UV_HTTP_TIMEOUT:-300}" \
	  UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$${PIP_INDEX_URL:-https://pypi.org/simple}}" \
	  $(BIN)/uv pip install --quiet --python $(E2E_VENV)/bin/python --override tests/e2e/overrides.txt \
	  -r tests/e2e/requirements.txt -e .
	@touch $@

# First the parts of the connector that need torch, NIXL or vLLM, then real servers. NIXL's LIBFABRIC backend, the one of
# EFA, has an environment of its own; where it cannot be made (no compiler, no Debian) this fails, unless LIBFABRIC= says
# that its tests are to be left out.
ifneq ($(LIBFABRIC),)
$(LIBFABRIC)/run: tests/reference/libfabric_env.sh | $(E2E_STAMP)
	@sh tests/reference/libfabric_env.sh $(E2E_VENV)/bin/python $(LIBFABRIC) >&2 || \
	  { rm -f $@; echo "no environment for LIBFABRIC; make e2e LIBFABRIC= leaves its tests out" >&2; exit 1; }
	@touch $@
endif

e2e: $(E2E_STAMP) $(if $(LIBFABRIC),$(LIBFABRIC)/run)
	LIBFABRIC_ENV=$(LIBFABRIC) $(E2E_VENV)/bin/python -m pytest tests/reference $(REFERENCE_ARGS)
	$(E2E_VENV)/bin/python -m pytest --confcutdir=tests/e2e tests/e2e $(E2E_ARGS)

serve-demo: $(E2E_STAMP)
	@$(E2E_VENV)/bin/python experiments/serve_demo.py

explore: $(STAMP)
	$(BIN)/pushkv explore --seeds $(SEEDS) --profile all --jobs $(JOBS)

# Not part of .ci/run: measuring makes tests slower. Left out: what runs the same code again and again (exhaustive worlds,
# mutants, pairs of runs, shrinking).
SEEN_ELSEWHERE := $(foreach name,exhaustive explore_command mutations pairs shrink,--ignore tests/protocol/test_$(name).py)
coverage: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/protocol tests/layout $(SEEN_ELSEWHERE) \
	  --ignore tests/layout/test_mutations.py --cov=pushkv.model.protocol --cov=pushkv.model.layout --cov-branch \
	  --cov-report=term-missing:skip-covered --cov-fail-under=100

lint: $(STAMP) .typing/pushkv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy .typing/pushkv

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy does not read package-dir: it sees the packages under their import names through these links.
.typing/pushkv:
	@mkdir -p $@
	@for part in model sim reference router; do ln -sfn ../../$$part $@/$$part; done

lock: $(STAMP)
	$(BIN)/python -m pip install --quiet uv
	env -u UV_INDEX_URL -u UV_DEFAULT_INDEX $(BIN)/uv lock --no-config --default-index https://pypi.org/simple

clean:
	rm -rf $(VENV) $(FAST_VENV) $(E2E_VENV) .typing build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
