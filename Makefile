# Every target works alone, in any order, twice in a row, from a fresh clone. Nothing is installed
# outside .venv except system packages that are missing (deploy/prepare.sh says which, and why).
#
#   make install   .venv, with dlcmd and diesel-server in .venv/bin
#   make demo      packs a folder of images, mounts it, trains on it; leaves build/demo/report.html
#   make test      the fast tier: finds what a change breaks   (ARGS="-k snapshot -x" for some of it,
#                  JOBS=0 for one by one, AFFECTED=1 for the deep tests of what you changed, too)
#   make test-deep   the deep tier: every kernel session, nodes, kills at each step, long searches
#   make test-clients   timm, datasets, lightning, accelerate, torchdata under dlcmd run
#   make test-bench   the benchmarks themselves, with tiny inputs: that they measure every row
#   make test-browser   the page of dlcmd dashboard, in Debian's chromium; leaves pictures of it
#   make test-s3   the laws of object stores against a real one: OpenStack Swift, on loopback
#   make test-kubernetes   a real Kubernetes API server: built once, for many minutes
#   make test-image   the steps of the Dockerfile in a root of Debian's, as root: no engine is needed
#   make docs      the documentation as a site that can be searched, in build/docs/site
#   make dist      the wheel and the sdist, into dist/
#   make deb       the Debian package, into dist/
#   make test-packages   installs these three in clean systems, and mounts a dataset in each: minutes
#   make lint      ruff and mypy
#   make bench     measures us against peers, prints a table
#   make fuzz      fuzzes what tests/fuzz/targets.py lists, each for a minute (SECONDS=600 for ten)
#
# PYTHON=python3.12 chooses the interpreter of a new .venv; else prepare.sh finds one.

SHELL := /bin/sh
.SHELLFLAGS := -ec
.ONESHELL:
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

# Programs start from compiled modules, as installed ones do.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
PEERS_PIP := $(VENV)/peers/bin/python -m pip --disable-pip-version-check --quiet
CLIENTS_PIP := $(VENV)/clients/bin/python -m pip --disable-pip-version-check --quiet
DOCS_PIP := $(VENV)/docs/bin/python -m pip --disable-pip-version-check --quiet
MADE := $(VENV)/made
ARGS ?=
JOBS ?=
# Four tests at a time on two processors, since a test often waits for a process or a clock; of the
# deep ones two, which have many processes of their own
PYTEST = $(VENV)/bin/python -m pytest --dist worksteal --numprocesses
AFFECTED ?=
# AFFECTED=1: what was changed since the last commit that others have, or since HEAD
SINCE ?= $(shell git rev-parse --verify --quiet '@{upstream}' 2>/dev/null || echo HEAD)
SECONDS ?= 60

# torchvision names one exact torch; its wheel is often built for CUDA where torch is not, and then
# would pull that torch in, hence --no-deps. deploy/torchvision_operators.py makes the pair import.
TORCH := torch==2.13.0
TORCHVISION := torchvision==0.28.0
# What the scripts of tests/torch/clients train with. Theirs is an environment as users have it.
CLIENTS := timm datasets lightning accelerate torchdata pandas pyarrow zarr fsspec pillow pytest \
	opencv-python-headless h5py
# What builds the documentation site, in an environment of its own.
DOCS := mkdocs mkdocs-material mkdocstrings[python] ruff
# The bench's peers want older numpy and xxhash than ours, so they get an environment of their own;
# matplotlib, which plots, is there too.
PEERS := mosaicml-streaming webdataset litdata ratarmount matplotlib pylibmc

# What drives the browser and looks for faults of accessibility: beside .venv, found by PYTHONPATH.
BROWSER := playwright
AXE := axe-core@4

.PHONY: help install demo test test-deep test-clients test-bench test-browser test-s3 test-kubernetes \
	test-image test-packages docs dist deb lint bench fuzz clean system-install system-test \
	system-s3 system-kubernetes system-image system-packages system-browser system-bench

help:
	@sed -n '/^#   make/s/^# *//p' Makefile

install: $(MADE)/install

demo: $(MADE)/demo
	@$(VENV)/bin/python -m deploy.demo

test: $(MADE)/tools $(MADE)/demo | system-test
	@$(PYTEST) $(or $(JOBS),4) $(if $(AFFECTED),--affected $(SINCE)) $(ARGS)

test-deep: $(MADE)/tools $(MADE)/demo | system-test
	@$(PYTEST) $(or $(JOBS),2) -m "not bench and (deep or hypothesis)" --hypothesis-profile deep $(ARGS)

test-clients: $(MADE)/tools $(MADE)/clients | system-test
	@$(VENV)/bin/python -m pytest tests/torch/clients $(ARGS)

test-bench: $(MADE)/tools $(MADE)/demo | system-test system-bench
	@$(VENV)/bin/python -m pytest tests/bench -m bench $(ARGS)

test-browser: $(MADE)/tools $(MADE)/browser | system-test
	@PYTHONPATH=$(VENV)/browser $(VENV)/bin/python -m pytest tests/browser $(ARGS)

test-s3: $(MADE)/tools | system-s3
	@$(VENV)/bin/python -m tests.storage.objects.swift_server $(VENV)/bin/python -m pytest -k cloud \
		tests/storage/objects/test_objects_contract.py $(ARGS)

test-kubernetes: $(MADE)/tools | system-test system-kubernetes
	@tests/kubernetes/build.sh
	$(VENV)/bin/python -m pytest tests/kubernetes/cluster $(ARGS)

test-image: $(MADE)/tools | system-test system-image
	@$(VENV)/bin/python -m pytest tests/image $(ARGS)

docs: $(MADE)/install $(MADE)/docs
	@$(VENV)/bin/python -m deploy.docs.site $(VENV)/docs/bin/mkdocs
	echo "build/docs/site: .venv/bin/python -m http.server --directory build/docs/site"

dist: $(MADE)/tools
	@$(VENV)/bin/python -m deploy.packages.dist

deb: $(MADE)/tools | system-packages
	@$(VENV)/bin/python -m deploy.packages.debian

test-packages: $(MADE)/tools | system-test system-packages
	@$(VENV)/bin/python -m pytest tests/deploy/clean_root -o faulthandler_timeout=3600 $(ARGS)

lint: $(MADE)/tools
	@failed=0
	$(VENV)/bin/ruff check || failed=1
	$(VENV)/bin/ruff format --check || failed=1
	$(VENV)/bin/mypy || failed=1
	exit $$failed

bench: $(MADE)/tools $(MADE)/demo $(MADE)/peers | system-test system-bench
	@$(VENV)/bin/python -m tests.bench $(ARGS)

fuzz: $(MADE)/tools
	@for target in $$($(VENV)/bin/python -m tests.fuzz); do
		$(VENV)/bin/python -m tests.fuzz $$target build/fuzz/$$target -max_total_time=$(SECONDS) \
			-timeout=10 -max_len=65536 -artifact_prefix=build/fuzz/$$target- || exit 1
	done

clean:
	rm -rf $(VENV) build dist share *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# System packages are looked for each time (it takes milliseconds), and installed where missing.
system-install:
	@PYTHON="$(PYTHON)" deploy/prepare.sh install

system-test:
	@PYTHON="$(PYTHON)" deploy/prepare.sh install test

system-s3:
	@PYTHON="$(PYTHON)" deploy/prepare.sh install s3

system-kubernetes:
	@PYTHON="$(PYTHON)" deploy/prepare.sh install kubernetes

system-image:
	@PYTHON="$(PYTHON)" deploy/prepare.sh install image

system-packages:
	@PYTHON="$(PYTHON)" deploy/prepare.sh install packages

system-browser:
	@PYTHON="$(PYTHON)" deploy/prepare.sh install browser

system-bench:
	@PYTHON="$(PYTHON)" deploy/prepare.sh install bench

OURS = @[ -w $(VENV) ] || { echo "$(VENV) belongs to $$(stat -c %U $(VENV)): run make as that \
user once, or remove $(VENV)" >&2; exit 1; }

# Stamps: what they stand for is done again when pyproject.toml or this file changes.
$(MADE)/install: pyproject.toml Makefile | system-install
	$(OURS)
	echo "installing diesel-fs into $(VENV)"
	$(PIP) install --editable '.[pyfuse3]'
	mkdir -p $(MADE)
	touch $@

$(MADE)/tools: $(MADE)/install
	$(OURS)
	echo "installing the test tools"
	$(PIP) install --editable '.[test]'
	touch $@

$(MADE)/demo: $(MADE)/install
	$(OURS)
	echo "installing $(TORCH) and $(TORCHVISION) (CPU suffices)"
	$(PIP) install --editable '.[demo]' '$(TORCH)' || {
		echo "$(TORCH) cannot be had for this Python; another may have it:" \
			"make clean, then make demo PYTHON=python3.12" >&2
		exit 1
	}
	$(PIP) install --no-deps '$(TORCHVISION)'
	touch $@

$(MADE)/docs: $(MADE)/install
	$(OURS)
	echo "installing what builds the site: $(DOCS)"
	[ -x $(VENV)/docs/bin/pip ] || $(VENV)/bin/python -m venv --clear $(VENV)/docs
	$(DOCS_PIP) install $(DOCS)
	touch $@

$(MADE)/clients: $(MADE)/install
	$(OURS)
	echo "installing what the clients' scripts train with: $(CLIENTS)"
	[ -x $(VENV)/clients/bin/pip ] || $(VENV)/bin/python -m venv --clear $(VENV)/clients
	$(CLIENTS_PIP) install '$(TORCH)'
	$(CLIENTS_PIP) install --no-deps '$(TORCHVISION)'
	$(CLIENTS_PIP) install $(CLIENTS) --editable .
	touch $@

$(MADE)/browser: $(MADE)/install | system-browser
	$(OURS)
	echo "installing what drives the browser: $(BROWSER), $(AXE)"
	$(PIP) install --upgrade --target $(VENV)/browser $(BROWSER)
	npm install --prefix $(VENV)/browser --no-save --ignore-scripts --silent $(AXE)
	touch $@

$(MADE)/peers: $(MADE)/install
	$(OURS)
	echo "installing the peers that the bench measures against: $(PEERS)"
	[ -x $(VENV)/peers/bin/pip ] || $(VENV)/bin/python -m venv --clear $(VENV)/peers
	$(PEERS_PIP) install '$(TORCH)'
	$(PEERS_PIP) install --no-deps '$(TORCHVISION)'
	$(PEERS_PIP) install $(PEERS)
	touch $@
