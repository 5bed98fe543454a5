# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ZOO := .venv-zoo
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all check setup bench results mutants fuzz zoo lint types docs notebooks site clean

$(VENV)/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[samples]'
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) -e '.[test]'
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) -e '.[dev]'
	touch $@

$(VENV)/.mutants: $(VENV)/.test
	$(PIP) -e '.[mutants]'
	touch $@

$(ZOO)/.ready: $(VENV)/.test tests/zoo/environment.sh tests/zoo/requirements.txt
	tests/zoo/environment.sh $(BIN)/python $(ZOO)
	touch $@

setup: $(VENV)/.dev  ## the environment, with all that development needs

demo: $(VENV)/.base  ## compress the handwritten-digits sample and print the result table
	$(BIN)/compress run samples/digits/spec.yaml

# Hundreds of processes that tests start would compile the package each, where no bytecode is kept.
test test-all: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/.test  ## the tests that take seconds each
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test-all: $(VENV)/.test  ## the slow tests too
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --hypothesis-profile thorough -m 'not benchmark and not zoo'

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

check: lint types test  ## what CI runs

bench: $(VENV)/.dev  ## the benchmark tables; real checkpoints are found through COMPRESSOR_DATA
	$(BIN)/python -m pytest -m benchmark -s

results: $(VENV)/.dev  ## the same tables, kept in docs/results.md with their date, versions and machine
	COMPRESSOR_RESULTS=docs/results.md $(BIN)/python -m pytest -m benchmark -s

# Each mutant has its own process, and memory in large pages is copied for it in half the time.
mutants: export GLIBC_TUNABLES = glibc.malloc.hugetlb=1
mutants: export PYTHONMALLOC = malloc
mutants: $(VENV)/.mutants  ## how many small bugs the tests catch; an hour at most, and then goes on where it was
	-OMP_NUM_THREADS=1 timeout 3600 $(BIN)/python tests/mutants.py run
	$(BIN)/python tests/mutants.py

fuzz: $(VENV)/.test  ## ten minutes of damaged and crafted files for everything that reads files; goes on where it was
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.run --seconds 600

zoo: $(ZOO)/.ready  ## many architectures through everything, into docs/zoo.md; goes on where it was
	LD_LIBRARY_PATH=$(ZOO)/lib/stand-ins nice $(ZOO)/bin/python -m tests.zoo.run --jobs 2
	$(ZOO)/bin/python -m tests.zoo.page
	$(ZOO)/bin/python -m pytest -m zoo tests/zoo

docs: $(VENV)/.dev  ## the generated reference pages
	$(BIN)/python docs/generate.py

notebooks: $(VENV)/.dev  ## the guide's notebooks, run again and kept with their output
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python docs/notebooks.py

site: $(VENV)/.dev  ## the user guide as web pages
	$(BIN)/python -m sphinx -W -q -b html docs out/site

clean:
	rm -rf $(VENV) $(ZOO) mutants out build dist *.egg-info
