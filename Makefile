# kvferry. `make help` lists what can be done here.
#
# All of it runs in .venv, made from constraints.txt on first use. A stamp file is written only after an install
# went through: an interrupted set-up is taken up again, a finished one costs nothing the next time.

SHELL := /bin/sh
PORT ?= 8000
PREFILL ?= 1
DECODE ?= 1
MODEL ?=
ARGS ?=
# How many times the histories of `make test` the state machines try in `make machines`.
MACHINES ?= 50
# Path or name of a Python >= 3.11, if the first one found is not the wanted one.
PYTHON ?=
PYTEST_ARGS ?=
# Messages at each socket, and seconds.
FUZZ ?= 100000
SOAK ?= 600
# Some of the clients of `make clients`, or parts of names of cells of `make chaos`; all where nothing is said.
ONLY ?=
# For `make promises`: --real, --seconds 60, --sample 200.
PROMISES ?=
# virtual or real: one of the two tables of `make chaos`.
WORLD ?=
# Whole services wait for timers and for each other, and leave two fifths of two cores idle. What only computes takes
# those, at a low priority: nothing of it is asked to be fast.
TESTS_OF_SERVICES := tests/e2e tests/coordinator/test_serve.py
TESTS_BESIDE := tests/kernels tests/exactness
TESTS_ALONE := tests/bench/test_virtual_speed.py
BESIDE_LOG := build/tests-beside.log
# mypy takes a minute where it has no cache, and then is one of them; with one it comes first.
COLD := $(if $(PYTEST_ARGS)$(wildcard .mypy_cache),,yes)

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
INSTALLED_BY := constraints.txt pyproject.toml setup.py $(wildcard kernels/native/*.c kernels/native/*.h)
CANDIDATES := $(PYTHON) python3.11 python3.12 python3.13 python3.14 python3 python

.PHONY: help serve test style services beside promises kernels machines chaos fuzz soak clients lint format clean
.DEFAULT_GOAL := help

help:
	@echo 'make serve    the whole service on this machine, with the default model'
	@echo '              PORT=8000 PREFILL=1 DECODE=1 MODEL=folder-or-hub-id ARGS="--max-num-seqs 64"'
	@echo 'make test     every check that CI runs (PYTEST_ARGS="tests/kernels -k rope" for some)'
	@echo 'make kernels  every case of the GPU kernels in Triton'"'"'s interpreter, and all of them compiled for sm_80 and sm_90'
	@echo 'make machines the state machines of make test, over 50 times as many histories, new ones each time (MACHINES=50)'
	@echo 'make chaos    every phase of a request meets every fault (ONLY="decoding / SIGKILL, message lost" for some;'
	@echo '              WORLD=virtual or WORLD=real for one of its two tables; about 8 minutes for both)'
	@echo 'make fuzz     100,000 mutated messages at every socket between processes, about 8 minutes (FUZZ=100000)'
	@echo 'make soak     mixed load, aborts and kills for ten minutes, with what grew meanwhile (SOAK=600)'
	@echo 'make promises what tiers are promised: chat beside a flood, three times the load, a mix that swings, in virtual time'
	@echo '              (PROMISES="--real --seconds 60" on this machine; 10 minutes)'
	@echo 'make clients  real clients against a real service, each in a venv of its own (ONLY="openai schemathesis")'
	@echo 'make lint     ruff and mypy alone'
	@echo 'make format   lets ruff lay out the code'
	@echo 'make clean    removes the venvs, caches and build products; the converted model stays'

serve: $(VENV)/.ready-to-serve
	@exec $(RUN) -m coordinator.cli serve --port $(PORT) --prefill $(PREFILL) --decode $(DECODE) \
	  $(if $(MODEL),--model '$(MODEL)') $(ARGS)

test: $(if $(COLD),style,lint)
ifneq ($(PYTEST_ARGS),)
	@echo '== tests: $(PYTEST_ARGS)'
	@$(RUN) -m pytest $(PYTEST_ARGS)
else
	@echo '== tests of whole services; beside them, in idle time, $(if $(COLD),mypy --strict and )$(TESTS_BESIDE) (shown when over)'
	@$(MAKE) --no-print-directory -j2 services beside
	@echo '== all others, two at a time'
	@$(RUN) -m pytest -n 2 --dist loadfile $(patsubst %,--ignore=%,$(TESTS_OF_SERVICES) $(TESTS_BESIDE) $(TESTS_ALONE)) tests
	@echo '== tests of speed, which want the cores for themselves'
	@$(RUN) -m pytest $(TESTS_ALONE)
endif

services:
	@$(RUN) -m pytest $(TESTS_OF_SERVICES)

beside:
	@mkdir -p $(dir $(BESIDE_LOG))
	@nice -n 10 sh -c '$(if $(COLD),$(RUN) -m mypy . &&) exec $(RUN) -m pytest $(TESTS_BESIDE)' \
	  > $(BESIDE_LOG) 2>&1; code=$$?; cat $(BESIDE_LOG); exit $$code

kernels: $(VENV)/.ready-to-test
	@KERNEL_GRID=whole $(RUN) -m pytest --timeout 0 -n 2 tests/kernels/gpu
	@$(RUN) -m bench.gpu_kernels_compiled --whole

machines: $(VENV)/.ready-to-test
	@MACHINES=$(MACHINES) $(RUN) -m pytest --timeout 0 -n 2 --dist loadfile tests/*/test_*_machine.py

chaos: $(VENV)/.ready-to-test
	@$(RUN) -m tests.chaos.run '$(ONLY)' $(WORLD)

fuzz: $(VENV)/.ready-to-test
	@$(RUN) -m tests.fuzz.run $(FUZZ)

soak: $(VENV)/.ready-to-test
	@$(RUN) -m tests.soak.run $(SOAK)

promises: $(VENV)/.ready-to-test
	@for load in beside overload swing; do $(RUN) -m bench.promises $$load $(PROMISES) || failed=1; done; exit $${failed:-0}

clients: $(VENV)/.ready-to-test
	@$(RUN) -m tests.clients.run $(ONLY)

lint: style
	@echo '== mypy --strict'
	@$(RUN) -m mypy .

style: $(VENV)/.ready-to-test
	@echo '== ruff check'
	@$(RUN) -m ruff check .
	@echo '== ruff format --check'
	@$(RUN) -m ruff format --check .

format: $(VENV)/.ready-to-test
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

# One install, not the service's and then the tests' on top, which would resolve and build all of it again.
$(VENV)/.ready-to-test: $(INSTALLED_BY) | $(VENV)/bin/python
	$(call install,.[test])
	@touch $(VENV)/.ready-to-serve $@

$(VENV)/.ready-to-serve: $(INSTALLED_BY) | $(VENV)/bin/python
	$(call install,.)
	@touch $@

# pip compiles on one core, and what it cannot compile (templates, other Pythons' files) is no fault here either.
define install
@echo '== installing setuptools into $(VENV) (seconds)'
@$(PIP) install --quiet -c constraints.txt setuptools
@echo '== installing kvferry and the versions of constraints.txt into $(VENV); with a C compiler, CPU kernels too'
@echo '   The first time downloads about 2 GB. While pip then unpacks and compiles, it prints nothing for a minute or two.'
@$(PIP) install --progress-bar on --no-compile -c constraints.txt --no-build-isolation -e '$(1)'
@$(RUN) -m compileall -qq -j 0 $(VENV)/lib || true
endef

$(VENV)/bin/python:
	@for python in $(CANDIDATES); do \
	  if command -v "$$python" >/dev/null 2>&1 && \
	     "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    echo "== making $(VENV) with $$("$$python" --version)"; \
	    exec "$$python" -m venv $(VENV); \
	  fi; \
	done; \
	echo 'kvferry needs Python 3.11 or newer with its venv module, and found none (looked for: $(strip $(CANDIDATES))).'; \
	echo 'On Debian or Ubuntu: apt-get install python3 python3-venv. Or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3'; \
	exit 1

clean:
	rm -rf $(VENV) .venv-clients build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.so' -not -path './.git/*' -delete
