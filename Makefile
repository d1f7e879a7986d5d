# What a newcomer types: `make train`, `make test`. `make help` lists the rest.
#
# Everything is installed into .venv. A step that succeeds leaves a stamp there: it runs again when what it
# depends on has changed, and after a failure half way.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps
WHEELS := .wheels
FOR_TESTS := $(VENV)/.installed-test $(if $(filter 0,$(HOROVOD)),,$(VENV)/.installed-horovod)

.PHONY: help setup train test test-all clean FORCE
.DEFAULT_GOAL := help

help:
	@echo "make train     train on the built-in digits (ARGS='--epochs 3' passes flags to scripts/train.py)"
	@echo "make test      run the tests that take minutes (ARGS='-k devices' passes flags to pytest); compiles Horovod first"
	@echo "make test HOROVOD=0  without Horovod, whose tests are then skipped"
	@echo "make test-all  run the long tests too"
	@echo "make setup     only make $(VENV), with the versions of docker/constraints.txt"
	@echo "make setup HOROVOD=1  Horovod too, compiled here (minutes, once)"
	@echo "make clean     remove $(VENV) and what testing left behind, but not the compiled Horovod in $(WHEELS)"
	@echo "PYTHON=python3.11 chooses the interpreter; without it, the first from 3.9 to 3.12 that is found"

setup: $(VENV)/.installed $(if $(filter-out 0,$(HOROVOD)),$(VENV)/.installed-horovod)

train: setup
	$(BIN)/python scripts/train.py $(ARGS)

test: $(FOR_TESTS)
	$(BIN)/python -m pytest -m "not slow" --durations 10 tests $(ARGS)

test-all: $(FOR_TESTS)
	$(BIN)/python -m pytest --durations 20 tests $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: $(VENV)/.python docker/constraints.txt setup.py
	@echo "Installing the packages of docker/constraints.txt into $(VENV) (about 250 MB to download, once)"
	$(PIP) -r docker/constraints.txt
	$(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed docker/constraints-test.txt
	$(PIP) -r docker/constraints-test.txt
	@touch $@

# A wheel that is there is taken, whatever make clean did to $(VENV), unless the script is newer.
$(VENV)/.installed-horovod: $(VENV)/.installed docker/build-horovod.sh \
    docker/constraints-build.txt docker/constraints-horovod.txt
	@mkdir -p $(WHEELS) && find $(WHEELS) -name "horovod-*" ! -newer docker/build-horovod.sh -delete
	@$(PIP) --force-reinstall --no-index --find-links $(WHEELS) \
	    $$(grep "^horovod" docker/constraints-horovod.txt) 2>/dev/null || \
	    docker/build-horovod.sh $(BIN)/python $(WHEELS)
	$(PIP) --force-reinstall --find-links $(WHEELS) -r docker/constraints-horovod.txt
	@touch $@

# The stamp holds the name of the interpreter. Another one asked for by PYTHON makes the environment anew.
ifneq ($(PYTHON),)
ifneq ($(PYTHON),$(shell cat $(VENV)/.python 2>/dev/null))
$(VENV)/.python: FORCE
endif
endif

$(VENV)/.python:
	@found=; bare=; \
	for python in $(or $(PYTHON),python3 python3.12 python3.11 python3.10 python3.9); do \
	    "$$python" -c "import sys; sys.exit(not (3, 9) <= sys.version_info < (3, 13))" 2>/dev/null || continue; \
	    if "$$python" -c "import venv, ensurepip" 2>/dev/null; then found="$$python"; break; fi; \
	    bare="$$python"; \
	done; \
	if [ -z "$$found" ] && [ -n "$$bare" ]; then \
	    echo "$$bare cannot make virtual environments (Debian, Ubuntu: apt-get install python3-venv)" >&2; \
	    exit 1; \
	elif [ -z "$$found" ]; then \
	    echo "$(or $(PYTHON),python3) is no Python 3.9 to 3.12; name one: make PYTHON=/path/to/python3.11" >&2; \
	    exit 1; \
	fi; \
	rm -rf $(VENV) && "$$found" -m venv $(VENV) && echo "$$found" > $@
