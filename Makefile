# Needs Python 3.11 or newer, make, and a package index; everything else is installed into .venv.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile

# Keep bytecode caches: hundreds of test processes import the package.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test lint test-all test-gpu bench-gpu clean

# Train with the default config: make train ARGS="run.name=first"
train: .venv/.installed
	$(BIN)/harness train $(ARGS)

# The quick tests: one proof of every kind.
test: .venv/.installed-test
	$(PYTEST) -m 'not full' $(ARGS)

# Format, lint and types.
lint: .venv/.installed-test
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

# Both, then the full matrix: every drill, every point of failure, a real Slurm.
test-all: lint test
	$(PYTEST) -m full $(ARGS)

# Tests that need CUDA, with a summary for docs.
test-gpu: .venv/.installed-test
	$(BIN)/python -m tests.gpu $(ARGS)

# Benchmarks that need CUDA.
bench-gpu: .venv/.installed-test
	$(BIN)/python -m tests.bench.gpu $(ARGS)

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is required; choose one with: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.installed: .venv/.created pyproject.toml
	@echo "Installing into .venv; the first time takes a few minutes."
	@$(PIP) --editable .
	@touch $@

.venv/.installed-test: .venv/.created pyproject.toml
	@echo "Installing into .venv; the first time takes a few minutes."
	@$(PIP) --editable '.[test]'
	@$(PIP) --editable '.[wandb]' || echo "W&B is not available: its sink is not tested"
	@$(PIP) --no-deps --upgrade --target .venv/triton 'triton>=3.9,<4' || echo "Triton is not available: kernels are not tested"
	@touch $@ .venv/.installed
