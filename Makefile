# make run   sets up, then runs a small real study with the embedded model
# make test  sets up, then runs every test
# Both are safe to repeat. `make help` lists the rest.

PYTHON ?= python3
MODEL ?= qwen2.5-coder-1.5b
OUT ?= runs/study
BIN := .venv/bin
NAME = quick-$(MODEL)

.PHONY: help setup run study toolcall test readme docs clean-setup

help:
	@echo "make setup   .venv with everything pinned by constraints.txt"
	@echo "make run     24 trials of the smart home on $(MODEL); another model: make run MODEL=smollm2-135m"
	@echo "make study   the first study, where it was stopped (hours); a new one: make study OUT=runs/mine"
	@echo "make toolcall  study B, 20 prompts a condition"
	@echo "make test    export and notebooks in step, every notebook, every test"
	@echo "make docs    the site, in _docs/"
	@echo "make readme  README.md from nbs/index.ipynb, as it was last executed"

setup: .venv/.ready

.venv/.ready: settings.ini setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "granite needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12 ...")'
	@echo ">> setting up .venv (a few minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

run: setup
	@echo ">> model $(MODEL): the file is fetched once and checked"
	@$(BIN)/granite models pull $(MODEL)
	@echo ">> smart home, easy and medium scenarios, four levels: 24 trials, each on disk as it ends (runs/$(NAME)/)"
	@mkdir -p runs/$(NAME)
	@$(BIN)/papermill nbs/run.ipynb runs/$(NAME)/run.ipynb --no-progress-bar -p model $(MODEL) -p name $(NAME) -p max_tokens 512 \
	  -y 'domains: [smarthome]' -y 'difficulties: [easy, medium]'
	@$(BIN)/granite score $(NAME)
	@echo ">> executed notebook: runs/$(NAME)/run.ipynb"
	@echo ">> figure:            figures/run-$(NAME).png"
	@echo ">> traces:            runs/$(NAME)/trials.jsonl (granite show $(NAME) smarthome-004)"

study: setup
	@echo ">> three models, 81 scenarios, four levels: what is open of it, each trial on disk as it ends ($(OUT)/)"
	@$(BIN)/granite models pull qwen2.5-coder-1.5b
	@$(BIN)/granite models pull qwen2.5-coder-0.5b
	@$(BIN)/granite models pull smollm2-135m
	@for part in first experiment; do $(BIN)/granite run runs/study/$$part.yaml --out $(OUT) || exit 1; done
	@for part in prompted repeats; do $(BIN)/granite run runs/study/$$part.yaml --out $(OUT)/$$part || exit 1; done
	@$(BIN)/papermill nbs/analysis/00_first_study.ipynb $(OUT)/results.ipynb --no-progress-bar -p runs $(OUT) -p prompted $(OUT)/prompted -p repeats $(OUT)/repeats
	@echo ">> results: $(OUT)/results.ipynb; against the committed study: granite compare runs/study/MODEL $(OUT)/MODEL"

toolcall: setup
	@echo ">> study B on qwen2.5-coder-0.5b: 20 prompts a condition, into runs/toolcall-sample/"
	@$(BIN)/granite models pull qwen2.5-coder-0.5b
	@mkdir -p runs/toolcall-sample
	@$(BIN)/papermill nbs/toolcall/run.ipynb runs/toolcall-sample/run.ipynb --no-progress-bar -p stages main -p limit 20 -p out runs/toolcall-sample

test: setup
	@echo ">> the package and the notebooks are in step"
	@$(BIN)/python tests/in_step.py
	@echo ">> every notebook"
	@$(BIN)/nbdev_test --n_workers 2
	@echo ">> tests"
	@$(BIN)/python -m pytest -q -m "not slow"

readme: setup
	@$(BIN)/jupyter nbconvert --log-level=ERROR --to markdown --no-input --output-dir . --output README.md nbs/index.ipynb

docs: setup
	@echo ">> the site, in _docs/"
	@$(BIN)/python docs/build.py

clean-setup:
	rm -rf .venv
