# Only calls commands; each also works by hand once .venv is there.
#   make audit                the whole ladder; ends with reports/index.html
#   make test                 every test; of the faults planted in kernels the first of each function
#   make test-faults          all of these faults
#   make check                formats, lint, types
#   make setup TORCH=system   uses the torch and triton that PYTHON has (a GPU machine) instead of the CPU pins
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -q
# What pip would compile on one core, on all, without the packages' own tests; what fails here fails where imported.
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x 'site-packages/.*/tests?/' .venv/lib
# Where the environment forbids bytecode, each of the many processes would compile the project anew.
OWN_BYTECODE := $(BIN)/python -m compileall -qq -j 0 dsv4 kernels rules
export OMP_NUM_THREADS ?= 1

# A .venv that is there says whose torch it uses.
SYSTEM := $(shell sed -n 's/^include-system-site-packages = //p' .venv/pyvenv.cfg 2>/dev/null)
TORCH ?= $(if $(filter true,$(SYSTEM)),system,cpu)
ifneq ($(filter $(TORCH)-$(SYSTEM),cpu-true system-false),)
$(error TORCH=$(TORCH), but .venv was made for the other kind; remove .venv first)
endif

# pip may neither replace the machine's torch nor put another triton before it. A virtual environment's packages
# are no "system" ones, so that PYTHON's are named in any case.
ifeq ($(TORCH),system)
CONSTRAINTS := -c constraints-gpu.txt -c .venv/machine.txt
OWN := from importlib.metadata import version; [print(name + '==' + version(name)) for name in ('torch', 'triton')]
PACKAGES := -c "import sysconfig; print(sysconfig.get_path('purelib'), sysconfig.get_path('platlib'), sep='\n')"
LET_SEE = $(PYTHON) $(PACKAGES) > "$$($(BIN)/python $(PACKAGES) | tail -1)/machine.pth"
else
CONSTRAINTS := -c constraints-cpu.txt
endif

.PHONY: audit test test-faults check setup
setup: .venv/.audit .venv/.dev

.venv/.audit: pyproject.toml constraints.txt constraints-cpu.txt constraints-gpu.txt
	@echo "set up .venv, once: torch ($(TORCH)) and what the audit needs, a minute or two"
ifeq ($(TORCH),system)
	@test -x $(BIN)/python || { $(PYTHON) -m venv --system-site-packages .venv && $(LET_SEE); }
	@$(BIN)/python -c "$(OWN)" > .venv/machine.txt 2> /dev/null || { echo "TORCH=system: $(PYTHON) has no torch and" \
	  "triton of its own; remove .venv and set PYTHON to the interpreter that has"; exit 1; }
	@echo "the machine's own: $$(paste -sd' ' .venv/machine.txt); needed: $$(grep '>=' constraints-gpu.txt | paste -sd' ')"
else
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) torch==2.13.0
endif
	@# The largest package meanwhile, where it is installed here.
	@$(COMPILE)/*/site-packages/torch & $(PIP) $(CONSTRAINTS) -e .; status=$$?; wait; exit $$status
	@$(COMPILE) || true
	@touch $@

.venv/.dev: .venv/.audit
	@echo "set up .venv, once: what the tests need, a minute"
	@$(PIP) $(CONSTRAINTS) -e ".[dev]"
	@$(PIP) $(CONSTRAINTS) --no-deps "nvidia-cuda-nvcc==13.0.*"  # its ptxas needs no other wheel
	@$(COMPILE) || true
	@touch $@

# make's own exit status is 2 whenever a command's is not 0; "Error 1" here means that a rung failed.
audit: .venv/.audit
	@$(OWN_BYTECODE)
	@$(BIN)/python -m dsv4 unlock
	@$(BIN)/snakemake all

# Three on two cores: many tests wait for the processes that they start.
test: .venv/.dev
	@$(OWN_BYTECODE)
	$(BIN)/python -m pytest -q -n 3 --dist loadgroup

test-faults: .venv/.dev
	$(BIN)/python -m pytest -q -n 2 kernels -k "faults" --every-fault

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile rules
	$(BIN)/pyright --pythonpath $(BIN)/python

# On a machine with a GPU, after `make setup TORCH=system`.
#   make build                every kernel for four architectures; needs no GPU
#   make test-gpu             tests of kernels, and of the model on them, without the interpreter
#   make sanitize             the same tests of kernels under compute-sanitizer: memcheck and racecheck
#   make bench                times, of kernels and of generation, into results/bench.json and docs/; what P4 and P5 change
#   make blackwell            all of these and the audit, on a Blackwell GPU: replaces "BLACKWELL: NOT RUN"
.PHONY: build test-gpu sanitize bench blackwell
CAPABILITY := import sys, torch; c = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0

build: .venv/.dev
	@$(BIN)/snakemake build

test-gpu: .venv/.dev
	@$(BIN)/python -c "import sys; from kernels.bench.__main__ import refused; sys.exit(refused())"
	$(BIN)/python -m pytest -q kernels dsv4/backend --every-fault -p no:cacheprovider --junitxml=results/gpu_tests.xml

sanitize: .venv/.dev
	@$(PIP) --no-deps "nvidia-cuda-sanitizer-api==13.5.*"
	$(BIN)/python -m kernels.sanitize --out results/sanitizer.json

bench: .venv/.dev
	@mkdir -p results; test -f results/bench.json || cp docs/bench.json results/bench.json 2>/dev/null || true
	@$(BIN)/python -m kernels.bench --out results/bench.json; status=$$?; \
	  $(BIN)/python -m kernels.bench.page results/bench.json docs/bench.md && cp results/bench.json docs/bench.json \
	  && $(BIN)/python -m kernels.mhc_rmsnorm_quantise_nvfp4.figures docs/evidence/p4_p5_figures.md \
	  && $(BIN)/python -m dsv4.generate.speed > docs/generation.md && exit $$status

# Each step runs whatever the one before found; the exit status is the worst.
blackwell: .venv/.dev
	@$(BIN)/python -c "$(CAPABILITY); sys.exit(None if c >= 10 else 'no Blackwell GPU here')"
	@status=0; for step in build test-gpu sanitize bench audit; do $(MAKE) --no-print-directory $$step || status=1; done; exit $$status
