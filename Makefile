# make demo   train gpext and stock gpytorch side by side on real data; table and figures in demo_output/
# make test   the whole test suite
# make laws   the laws once more, with other random numbers and without the CPU's vector instructions
# make dist   the wheel and the sdist, and the README's examples by the wheel alone
# make lint, make types
# Each target creates .venv by itself. PYTHON chooses the interpreter (3.10 or later).
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
LAWS := tests/laws tests/solvers tests/operators tests/optim tests/test_statistics.py
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test laws dist lint types clean

$(VENV)/.base: setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(INSTALL) -e '.[test,dev]'
	touch $@

demo: $(VENV)/.base
	$(RUN) benchmarks/demo.py --output demo_output

# A process a core, each with one thread: threads inside an operation would only get in each other's way.
test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist loadfile

laws: $(VENV)/.test
	GPEXT_TEST_SEED=1 ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto $(LAWS)

dist: $(VENV)/.test
	rm -rf dist
	$(RUN) -m build --outdir dist
	$(RUN) scripts/try_wheel.py dist/*.whl

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.test
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) demo_output dist
