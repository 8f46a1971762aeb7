# Only calls commands; each also works by hand once .venv is there.
#   make audit                the whole ladder; ends with reports/index.html
#   make test                 every test
#   make check                formats, lint, types
#   make setup TORCH=system   uses the torch and triton of this machine (a GPU machine) instead of the CPU pins
PYTHON ?= python3
TORCH ?= cpu
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q
export OMP_NUM_THREADS ?= 1

ifeq ($(TORCH),system)
VENV_FLAGS := --system-site-packages
CONSTRAINTS :=
else
VENV_FLAGS :=
CONSTRAINTS := -c constraints-cpu.txt
endif

.PHONY: audit test check setup
setup: .venv/.audit .venv/.dev

.venv/.audit: pyproject.toml constraints-cpu.txt
	@echo "set up .venv, once: torch ($(TORCH)) and what the audit needs, a minute or two"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV_FLAGS) .venv
ifeq ($(TORCH),system)
	@$(BIN)/python -c "import torch, triton; print('torch', torch.__version__, 'triton', triton.__version__)" \
	  || { echo "TORCH=system: $(PYTHON) has no torch or no triton of its own"; exit 1; }
else
	@$(PIP) torch==2.13.0
endif
	@$(PIP) $(CONSTRAINTS) -e .
	@touch $@

.venv/.dev: .venv/.audit
	@echo "set up .venv, once: what the tests need, a minute"
	@$(PIP) $(CONSTRAINTS) -e ".[dev]"
	@touch $@

# make's own exit status is 2 whenever a command's is not 0; "Error 1" here means that a rung failed.
audit: .venv/.audit
	@$(BIN)/python -m dsv4 unlock
	@$(BIN)/snakemake all

test: .venv/.dev
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup

check: .venv/.dev
	@$(PIP) $(CONSTRAINTS) --no-deps "nvidia-cuda-nvcc==13.0.*"  # its ptxas needs no other wheel
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile rules
	$(BIN)/pyright --pythonpath $(BIN)/python
