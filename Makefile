# Everything there is to do here. `make help` lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV_VERSION := 0.13.8
PACKAGES := $(patsubst %/pyproject.toml,%,$(wildcard libs/*/pyproject.toml services/*/pyproject.toml))
SETUP := $(VENV)/.installed
ARGS ?=
SEED ?= 0
KIND ?= service

.DEFAULT_GOAL := help

.PHONY: help
help: ## list what there is
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(SETUP): requirements.lock pyproject.toml $(addsuffix /pyproject.toml,$(PACKAGES))
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] < (3, 13) else "Python 3.11 or 3.12 is needed (make PYTHON=python3.11 ...); this is " + sys.version.split()[0])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the locked workspace into $(VENV) (the first time takes a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@$(BIN)/uv pip install --python $(BIN)/python --require-hashes -r requirements.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation $(addprefix -e ,$(PACKAGES))
	@touch $@

.PHONY: setup
setup: $(SETUP) ## make .venv and install the locked workspace

.PHONY: run
run: $(SETUP) ## run a cluster here: ZooKeeper, bookies, broker (ARGS="--bookies 6")
	@exec $(BIN)/bindery standalone $(ARGS)

.PHONY: demo
demo: $(SETUP) ## real data through a cluster of its own, with kill -9 on the way
	@exec $(BIN)/python bench/demo.py $(ARGS)

.PHONY: lint
lint: $(SETUP) ## ruff and the layer contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

.PHONY: format
format: $(SETUP) ## rewrite the sources in the one format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: types
types: $(SETUP) ## mypy, strict
	@$(BIN)/mypy $(addsuffix /src,$(PACKAGES))

.PHONY: test
test: $(SETUP) ## every test that needs no Kubernetes
	@$(BIN)/python -m pytest $(ARGS)

.PHONY: interop
interop: $(SETUP) ## Apache BookKeeper's client, bookies and tools against ours; needs a JDK and Maven (ARGS=--write)
	@exec $(BIN)/python -m pytest e2e/interop $(ARGS)

.PHONY: sim
sim: $(SETUP) ## replay a seed with its trace (SEED=7, KIND=service or protocol)
	@exec $(BIN)/python -m bindery_simulation $(KIND) --seed $(SEED) --trace $(ARGS)

.PHONY: fuzz
fuzz: $(SETUP) ## hostile frames against real bookies, 30 s (ARGS="--frames 1000000 --seed 7")
	@exec $(BIN)/python bench/fuzz_wire.py $(ARGS)

.PHONY: sim-ci
sim-ci: $(SETUP) ## simulate clusters and protocol histories for three minutes
	@$(BIN)/python -m bindery_simulation protocol --seconds 60 --first $$(git log -1 --format=%ct 2>/dev/null || echo 0) --jobs 2
	@$(BIN)/python -m bindery_simulation service --seconds 120 --first $$(git log -1 --format=%ct 2>/dev/null || echo 0) --jobs 2

.PHONY: bench
bench: $(SETUP) ## measure bookie, client and HTTP API apart (ARGS="--seconds 3")
	@exec $(BIN)/python bench/run.py $(ARGS)

.PHONY: proto
proto: $(SETUP) ## generate the protobuf modules from our .proto files
	@$(BIN)/python tools/generate_proto.py

.PHONY: lock
lock: $(SETUP) ## resolve requirements.lock anew (ARGS="--upgrade")
	@$(BIN)/python tools/lock.py $(ARGS)
