PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.setup-stamp
DEMO_OUT ?= demo-out
BENCH_OUT ?= bench-out
FIGURES_OUT ?= figures-out
# Processes that share the tests, file by file. One of them starts further processes, so more are not better.
TEST_PROCESSES ?= 2
# Most tests that take long start Python; it compiles all modules every time where it may not keep what it compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint docs bench figures k8s clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(STAMP) ## make .venv and install rayspec into it (nothing to do when up to date)

$(STAMP): pyproject.toml hatch_build.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# pip chooses the build of torch; uv installs the rest in a tenth of the time, or pip where uv cannot.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[dev]' || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup ## twelve documents with plain decoding and with `auto`, compared: demo-out/report.html
	$(BIN)/rayspec demo --output $(DEMO_OUT)

test: setup ## run the test suite
	$(BIN)/python -m pytest -n $(TEST_PROCESSES)

test-all: setup ## run the test suite with the tests that take minutes
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m "exhaustive or not exhaustive" --hypothesis-profile many

lint: setup ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

docs: setup ## the documentation as a site: site/index.html
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --quiet --strict

bench: setup ## decoding speed on the widened demo model, against transformers generate: bench-out/results.md
	$(BIN)/rayspec bench --model demo --widen 8 --dtype bfloat16 --num-threads 2 --input demo --context 1024 \
	  --strategies knapspec,auto --max-tokens 128 --num-prompts 4 --batch 1 --repeats 3 --output $(BENCH_OUT)

figures: setup ## KnapSpec's experiments on the widened demo model, with what `rayspec bench` found if BENCH names it
	$(BIN)/python -m benchmarks figures --model demo --widen 8 --dtype bfloat16 --num-threads 2 --output $(FIGURES_OUT) \
	  $(if $(BENCH),--bench $(BENCH))

k8s: setup ## render the manifests of k8s/overlays
	$(BIN)/rayspec k8s overlays k8s/overlays

clean: ## remove what the targets made, except .venv
	rm -rf $(DEMO_OUT) $(BENCH_OUT) $(FIGURES_OUT) site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
