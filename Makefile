# Development tasks. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV_VERSION := 0.13.8
PACKAGES := $(patsubst %/pyproject.toml,%,$(wildcard libs/*/pyproject.toml services/*/pyproject.toml cli/pyproject.toml spark-jobs/pyproject.toml e2e/pyproject.toml e2e/simulation/pyproject.toml))
SETUP := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
ARGS ?=
SEED ?= 0
KIND ?= service
MINUTES ?= 60
SECONDS ?= 60
KILLS ?= 50
MESSAGES ?= 1000000
RATE ?= 20000
SIM_SECONDS ?= 60
STORAGE_SECONDS ?= 60
# Number of test processes: one more than cores, because many tests wait for servers; at most four, because servers
# need memory.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN); test "$$n" -lt 3 && echo "$$((n + 1))" || echo 4)

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# uv's cache first. PySpark exists as sources only; uv builds its wheel once, but a registry that answers without cache
# headers makes uv download and build it again (1.9 GB of cache) whenever it asks. --offline takes what is cached.
LOCKED = $(BIN)/uv pip install --python $(BIN)/python --no-deps --require-hashes

$(SETUP): requirements.lock pyproject.toml $(addsuffix /pyproject.toml,$(PACKAGES))
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] < (3, 13) else "Python 3.11 or 3.12 is needed (make PYTHON=python3.11 ...); this is " + sys.version.split()[0])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the locked workspace into $(VENV) (the first time takes a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@$(LOCKED) --offline -r requirements.lock 2>/dev/null || { $(LOCKED) --offline -c requirements.lock $$(grep -o '^pyspark==[0-9.]*' requirements.lock) 2>/dev/null || true; $(LOCKED) -r requirements.lock; }
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation $(addprefix -e ,$(PACKAGES))
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true # errors are reported at the import
	@touch $@

# Without bytecode, each process compiles its imports at its start; in some environments Python must not write bytecode.
$(COMPILED): $(SETUP) $(shell find $(addsuffix /src,$(PACKAGES)) -name '*.py')
	@$(BIN)/python -m compileall -q $(addsuffix /src,$(PACKAGES))
	@touch $@

.PHONY: setup
setup: $(COMPILED) ## create .venv and install the locked workspace

.PHONY: run
run: $(COMPILED) ## run a cluster here: ZooKeeper, bookies, broker (ARGS="--bookies 6")
	@exec $(BIN)/bindery standalone $(ARGS)

.PHONY: demo
demo: $(COMPILED) ## send real data through a temporary cluster and kill its processes meanwhile
	@exec $(BIN)/python bench/demo.py $(ARGS)

.PHONY: lint
lint: $(SETUP) ## ruff, the layer contracts, import cycles, wording, and whether the chart's generated page is current
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/python tools/structure.py
	@$(BIN)/python tools/wording.py
	@$(BIN)/python tools/chart_readme.py --check

.PHONY: format
format: $(SETUP) ## format the sources
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: types
types: $(SETUP) ## check the types with mypy (strict)
	@$(BIN)/mypy $(addsuffix /src,$(PACKAGES))

# Pytest caches rewritten asserts as bytecode, so that workers need not rewrite them again.
.PHONY: test
test: $(COMPILED) ## run every test that needs no Kubernetes, without the simulator's mutants (ARGS="-n 0": one process; ARGS=libs/core: a part)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 20 -m "not simulator" $(ARGS)

.PHONY: interop
interop: $(SETUP) ## test against Apache BookKeeper's client, bookies and tools, Pulsar's managed ledger and pulsar tokens; needs a JDK and Maven (ARGS=--write)
	@exec $(BIN)/python -m pytest e2e/interop e2e/cursors e2e/pulsar_tokens $(ARGS)

.PHONY: interop-admin
interop-admin: $(SETUP) ## run pulsar-admin against Bindery and Pulsar, and compare; needs a JDK and Maven (ARGS=--write)
	@exec $(BIN)/python -m pytest e2e/pulsar_admin $(ARGS)

.PHONY: interop-beside
interop-beside: $(SETUP) ## move namespaces between brokers of Pulsar and of Bindery on one cluster; needs a JDK and Maven
	@exec $(BIN)/python -m pytest e2e/beside_pulsar $(ARGS)

.PHONY: healing
healing: $(COMPILED) ## kill bookies, auditors and ZooKeeper under load, and measure recovery
	@exec $(BIN)/python -m pytest e2e/healing -rfEP --numprocesses 2 --dist loadfile $(ARGS)

.PHONY: ordering
ordering: $(COMPILED) ## load a key-shared subscription while its consumers join, leave and are killed; judge the order (SECONDS=60 SEED=7, ARGS="--kind failover")
	@exec $(BIN)/python -m bindery_e2e ordering --seconds $(SECONDS) --seed $(SEED) $(ARGS)

.PHONY: kills
kills: $(COMPILED) ## kill -9 the broker under load; judge redelivery counts and acknowledgements (KILLS=50 SEED=7)
	@exec $(BIN)/python -m bindery_e2e kills --kills $(KILLS) --seed $(SEED) $(ARGS)

.PHONY: retries
retries: $(COMPILED) ## kill -9 broker and bookies while messages are retried; judge copies and dead letters (KILLS=20 SEED=7)
	@exec $(BIN)/python -m bindery_e2e retries --kills $(KILLS) --seed $(SEED) $(ARGS)

.PHONY: repeats
repeats: $(COMPILED) ## cut connections and kill -9 the brokers while producers repeat their requests; judge the copies (SECONDS=60 KILLS=4 SEED=7)
	@exec $(BIN)/python -m bindery_e2e repeats --seconds $(SECONDS) --kills $(KILLS) --seed $(SEED) $(ARGS)

.PHONY: delayed
delayed: $(COMPILED) ## store a million delayed messages, kill -9 the broker twice, receive all; figures (MESSAGES=100000 RATE=5000 SEED=7)
	@exec $(BIN)/python -m bindery_e2e delayed --messages $(MESSAGES) --rate $(RATE) --seed $(SEED) $(ARGS)

.PHONY: churn
churn: $(COMPILED) ## write ledgers and delete nine of ten soon; judge the disk space of bookies and the latency (SECONDS=1200 SEED=7, ARGS=--topics)
	@exec $(BIN)/python -m bindery_e2e churn --seconds $(SECONDS) --seed $(SEED) $(ARGS)

.PHONY: spark-kills
spark-kills: $(COMPILED) ## kill -9 the driver of a streaming job from topics to topics; each message must be stored once (ARGS="--kills 10 --partitions 3")
	@exec $(BIN)/python bench/spark_kills.py $(ARGS)

.PHONY: attacks
attacks: $(COMPILED) ## attack the ports of real processes: hostile clients, without tokens and with limited memory
	@exec $(BIN)/python -m pytest e2e/attacks -rfEP -n 0 $(ARGS)

.PHONY: browser
browser: $(COMPILED) ## open hostile web pages in a real browser against a cluster; installs Chromium if it is missing
	@exec .ci/with-chromium $(BIN)/python -m pytest e2e/browser -rfEP -n 0 $(ARGS)

.PHONY: audit-truth
audit-truth: $(COMPILED) ## inject each kind of fault: the audit must report exactly those, and recovery must repair them (SEED=7)
	@BINDERY_AUDIT_SEED=$(SEED) exec $(BIN)/python -m pytest e2e/audit/test_truth.py e2e/audit/test_command.py -rfEP -n 0 $(ARGS)

.PHONY: audit-pods
audit-pods: $(COMPILED) ## run the audit's pods as processes and kill drivers and executors; needs no Kubernetes
	@exec $(BIN)/python -m pytest e2e/audit/test_pods.py -rfEP -n 0 $(ARGS)

.PHONY: e2e
e2e: $(COMPILED) ## test on Kubernetes: install, helm test, each fault under traffic, a broken build (KUBECONFIG, or a temporary cluster)
	@exec .ci/with-cluster $(BIN)/python -m pytest -m kubernetes e2e/kubernetes charts/tests -rfEP --durations 20 $(ARGS)

.PHONY: chaos
chaos: $(COMPILED) ## inject random faults on Kubernetes under traffic, with a verdict and a report (MINUTES=60 SEED=7)
	@exec .ci/with-cluster $(BIN)/python -m bindery_e2e chaos --minutes $(MINUTES) --seed $(SEED) $(ARGS)

.PHONY: sim
sim: $(SETUP) ## simulate one seed and print its trace (SEED=7, KIND=service, topics, policies or protocol)
	@exec $(BIN)/python -m bindery_simulation $(KIND) --seed $(SEED) --trace $(ARGS)

.PHONY: fuzz
fuzz: $(SETUP) ## send malformed frames to real bookies for 30 s (ARGS="--frames 1000000 --seed 7")
	@exec $(BIN)/python bench/fuzz_wire.py $(ARGS)

.PHONY: fuzz-http
fuzz-http: $(SETUP) ## send hostile requests to a real broker, bookie and auditor for 30 s (ARGS="--requests 100000 --seed 7")
	@exec $(BIN)/python bench/fuzz_http.py $(ARGS)

.PHONY: sim-ci
sim-ci: $(SETUP) ## prove that the simulator catches each mutant; then simulate histories for three and a half minutes (SIM_SECONDS=60)
	@$(BIN)/python -m pytest e2e/simulation -m simulator --numprocesses 2 --dist loadfile
	@$(BIN)/python -m bindery_simulation protocol --seconds $(SIM_SECONDS) --first $$(git log -1 --format=%ct 2>/dev/null || echo 0) --jobs 2
	@$(BIN)/python -m bindery_simulation policies --seconds $$(($(SIM_SECONDS) / 2)) --first $$(git log -1 --format=%ct 2>/dev/null || echo 0) --jobs 2
	@$(BIN)/python -m bindery_simulation topics --seconds $$(($(SIM_SECONDS) / 2)) --first $$(git log -1 --format=%ct 2>/dev/null || echo 0) --jobs 2
	@$(BIN)/python -m bindery_simulation service --seconds $$((3 * $(SIM_SECONDS) / 2)) --first $$(git log -1 --format=%ct 2>/dev/null || echo 0) --jobs 2

.PHONY: storage-ci
storage-ci: $(SETUP) ## simulate power cuts of a bookie for one minute and damaged files for half of it (STORAGE_SECONDS=60)
	@$(BIN)/python -m bindery_simulation storage crash --seconds $(STORAGE_SECONDS) --first $$(git log -1 --format=%ct 2>/dev/null || echo 0) --jobs 2
	@$(BIN)/python -m bindery_simulation storage damage --seconds $$(($(STORAGE_SECONDS) / 2)) --first $$(git log -1 --format=%ct 2>/dev/null || echo 0) --jobs 2

.PHONY: bench
bench: $(COMPILED) ## measure bookie, client and HTTP API separately (ARGS="--seconds 3")
	@exec $(BIN)/python bench/run.py $(ARGS)

.PHONY: bench-peer
bench-peer: $(COMPILED) ## compare with Apache BookKeeper in one run, 4 minutes; needs a JDK and ../shared/peers (ARGS=--full: 18)
	@exec $(BIN)/python bench/peer.py $(ARGS)

.PHONY: images
images: ## build the five images with docker (ARGS="--version 0.1.1 --only broker"; docker/build.py --help)
	@$(PYTHON) docker/build.py $(ARGS)

.PHONY: chart
chart: $(SETUP) ## lint and render the Helm chart with every preset, refuse wrong values; needs helm (HELM=path)
	@$(BIN)/python -m pytest -m 'not kubernetes' charts/tests --numprocesses $(WORKERS) --dist loadfile $(ARGS)

.PHONY: chart-files
chart-files: $(SETUP) ## generate the chart's schema and README from its values and the services' settings
	@$(BIN)/python tools/chart_schema.py
	@$(BIN)/python tools/chart_readme.py

.PHONY: mutants
mutants: $(COMPILED) ## mutation testing: change code in a scratch copy; the tests must fail (ARGS="libs/core/src --count 30 --seed 7")
	@exec $(BIN)/python tools/mutants.py $(ARGS)

.PHONY: proto
proto: $(SETUP) ## generate the protobuf modules from our .proto files
	@$(BIN)/python tools/generate_proto.py

.PHONY: sbom
sbom: $(SETUP) ## check hashes and licences of all locked packages; write their bills of materials to dist/sbom (ARGS=--check)
	@$(BIN)/python tools/sbom.py $(ARGS)

.PHONY: lock
lock: $(SETUP) ## resolve requirements.lock again (ARGS="--upgrade")
	@$(BIN)/python tools/lock.py $(ARGS)
