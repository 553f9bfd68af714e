# `make train` and `make test` need nothing but Python 3.11 or later and make.
#
# Both set up .venv on the first call and install again only after pyproject.toml or
# constraints.txt has changed. The package is installed in place: an edited file is what runs.

# Set on make's command line only: in a person's environment, ENV is the start-up file of sh.
ENV = ALE/Pong-v5
ALGORITHM ?= batched_a2c
MINUTES ?= 30
SEED ?= 1
# Atari games, batched: one learner a core, up to four, and an actor each; 16 columns in all.
LEARNERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores : 4)))
ARRANGEMENT = --num-learners $(LEARNERS) --num-actors $(LEARNERS) \
	--num-envs $(shell echo $$((16 / $(LEARNERS))))
# Further flags for `repertory train`, as on its command line.
FLAGS ?=

# The rules of an Atari game that published A3C and A2C curves use; other ids have only one set.
PROTOCOL ?= $(if $(filter ALE/%,$(ENV)),dqn)
# A mean return of 18 of 21 counts as solving Pong; other games have no such mark.
STOP_AT_RETURN ?= $(if $(filter ALE/Pong-v5,$(ENV)),18)

VENV ?= .venv
# The exact versions to install; /dev/null takes the newest instead.
CONSTRAINTS ?= constraints.txt
# Pass an empty value to watch pip download.
PIP_FLAGS ?= --quiet
# Test processes. More of them disturb one another: several tests start processes of their own.
TEST_WORKERS ?= 2

# `python3` first, since that is the one whose packages and mirrors a person has set up.
IS_SUITABLE := -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$python" $(IS_SUITABLE) && echo "$$python" && break; done)

INSTALL := $(VENV)/bin/python -m pip install $(PIP_FLAGS) --disable-pip-version-check \
	--constraint $(CONSTRAINTS)
TRAINING_READY := $(VENV)/.training-ready
TESTS_READY    := $(VENV)/.tests-ready

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train test check nightly clean

help: ## say what there is
	@echo 'make train    train an agent: ENV=$(ENV) ALGORITHM=$(ALGORITHM) MINUTES=$(MINUTES)'
	@echo '              (also SEED=, PROTOCOL=, STOP_AT_RETURN=, FLAGS="--num-envs 16 ...")'
	@echo 'make test     everything that a change must pass: format, lint, types, all tests'
	@echo 'make check    the same, but of the tests only the fast ones'
	@echo 'make nightly  the tests that take minutes: learning over several seeds, stress'
	@echo 'make clean    remove .venv and the caches; runs/ stays'

train: $(TRAINING_READY)
	@$(VENV)/bin/repertory train $(ALGORITHM) --env $(ENV) --seed $(SEED) \
		$(if $(PROTOCOL),--protocol $(PROTOCOL)) \
		$(if $(STOP_AT_RETURN),--stop-at-return $(STOP_AT_RETURN)) \
		$(if $(filter batched_a2c-ALE/%,$(ALGORITHM)-$(ENV)),$(ARRANGEMENT)) \
		--max-minutes $(MINUTES) $(FLAGS)

test: $(TESTS_READY)
	@PATH="$(abspath $(VENV))/bin:$$PATH" TEST_WORKERS=$(TEST_WORKERS) scripts/check full

check: $(TESTS_READY)
	@PATH="$(abspath $(VENV))/bin:$$PATH" TEST_WORKERS=$(TEST_WORKERS) scripts/check fast

nightly: $(TESTS_READY)
	@PATH="$(abspath $(VENV))/bin:$$PATH" scripts/check nightly

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# pyvenv.cfg rather than bin/python, which is a link whose date is that of the system's Python.
$(VENV)/pyvenv.cfg:
	@"$(PYTHON)" $(IS_SUITABLE) || { echo 'repertory needs Python 3.11 or later with its venv' \
		'module (on Debian and Ubuntu: python3-venv). To name one: make PYTHON=/path/to/python' \
		>&2; exit 1; }
	@echo "Making $(VENV) with $$("$(PYTHON)" --version)."
	@"$(PYTHON)" -m venv --clear $(VENV)

# torch goes first and alone: asked for together with the rest, a newer build that is many times
# as large can win before the constraint is looked at.
$(TRAINING_READY): pyproject.toml $(CONSTRAINTS) $(VENV)/pyvenv.cfg
	@echo 'Installing what training needs (once; one to ten minutes, most of it PyTorch).'
	@$(INSTALL) torch
	@$(INSTALL) --editable '.[atari]'
	@touch $@

# The tests need all that training needs, so whoever has them can train as well.
$(TESTS_READY): pyproject.toml $(CONSTRAINTS) $(VENV)/pyvenv.cfg
	@echo 'Installing what the tests need (once; two to fifteen minutes, most of it PyTorch).'
	@$(INSTALL) torch
	@$(INSTALL) --editable '.[dev]'
	@touch $(TRAINING_READY) $@
