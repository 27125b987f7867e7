# make demo   train gpext and stock gpytorch side by side on real data; table and figures in demo_output/
# make test   the whole test suite
# make test-fast   all laws at one seed and whatever is quick beside them
# make laws   the laws once more, with other random numbers and without the CPU's vector instructions; not those of
#             devices, which test no arithmetic
# make docs   the documentation site in docs/_build/html; warnings are errors
# make docs-links   the same, and a check of every local link and anchor
# make docs-check   the same without running the code on the pages, which `make test` runs
# make lint, make types
# make dist   wheel and sdist in dist/; the wheel is installed into an environment of its own and runs the README there
# make laws-lowest, make laws-newest   the laws with every dependency at its declared lower bound, or the newest
# Each target creates .venv by itself. PYTHON chooses the interpreter (3.10 or later).
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
LAWS := tests/laws --ignore-glob=*_device_laws.py tests/solvers tests/operators tests/optim tests/test_statistics.py
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-fast laws docs docs-links docs-check lint types dist laws-lowest laws-newest clean

$(VENV)/.base: setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(INSTALL) -e '.[test,dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.base
	$(INSTALL) -e '.[docs]'
	touch $@

demo: $(VENV)/.base
	$(RUN) benchmarks/demo.py --output demo_output

# A process a core, each with one thread: threads inside an operation would only get in each other's way.
test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist loadfile

test-fast: $(VENV)/.test
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist loadfile -m "not slow"

laws: $(VENV)/.test
	GPEXT_TEST_SEED=1 ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto $(LAWS)

docs: $(VENV)/.docs
	OMP_NUM_THREADS=1 $(RUN) -m sphinx -n -W --keep-going -q -j auto -d docs/_build/doctrees -b html docs docs/_build/html

docs-links: docs
	$(RUN) docs/links.py docs/_build/html

docs-check: $(VENV)/.docs
	GPEXT_DOCS_EXECUTE=0 OMP_NUM_THREADS=1 $(RUN) -m sphinx -n -W --keep-going -q -j auto -d docs/_build/check-doctrees \
		-b html docs docs/_build/check
	$(RUN) docs/links.py docs/_build/check

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.test
	$(VENV)/bin/mypy

$(VENV)-build/.done:
	$(PYTHON) -m venv $(VENV)-build
	$(VENV)-build/bin/python -m pip install --quiet --disable-pip-version-check build
	touch $@

dist: $(VENV)-build/.done
	rm -rf dist $(VENV)-wheel
	$(VENV)-build/bin/python -m build --outdir dist . > $(VENV)-build/log || { cat $(VENV)-build/log; exit 1; }
	$(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl pytest
	OMP_NUM_THREADS=1 $(VENV)-wheel/bin/python scripts/check_wheel.py dist

# The lower bounds have wheels for Python 3.10 to 3.12 only: PYTHON=python3.10 make laws-lowest
laws-lowest laws-newest: laws-%:
	$(PYTHON) -m venv $(VENV)-$*
	test $* = newest || $(PYTHON) scripts/lower_bounds.py > $(VENV)-$*/constraints.txt
	touch $(VENV)-$*/constraints.txt
	$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check -c $(VENV)-$*/constraints.txt --upgrade \
		-e . pytest pytest-xdist mpmath
	OMP_NUM_THREADS=1 $(VENV)-$*/bin/python -m pytest -n auto tests/laws

clean:
	rm -rf $(VENV) $(VENV)-* dist demo_output docs/_build docs/gallery/*.ipynb docs/gallery/*.png
