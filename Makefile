# make setup | demo | unit | test | test-all | test-extended | versions | lint | docs: each does all its own set-up, in .venv; running it again is quick.
# make release-check needs no set-up.
#
# PYTHON     the interpreter to build .venv with (3.11 or newer)
# PIP_ARGS   further arguments of every pip call, such as --index-url
# VERSIONS   arguments of `make versions`, such as "--versions 0.30 0.31"

PYTHON ?= python3
PIP_ARGS ?=
VERSIONS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS)
# The same, saying how far it is: the big lists take minutes, and half as long where only what is imported is compiled, then.
SHOWN := $(BIN)/python scripts/install.py --no-compile $(PIP_ARGS)
REQUIREMENTS := requirements/torch.txt requirements/cpu.txt requirements/dev.txt
# The stamp carries what was installed: another list makes another stamp.
STAMP := $(VENV)/.steercap-$(shell cat $(REQUIREMENTS) pyproject.toml | cksum | cut -d' ' -f1)

# Several files of tests at once, as an engine's start is one process after the other; each with engines of its own.
# Their order is that of tests/scheduling.py.
PARALLEL := --numprocesses=logical --maxprocesses=2 --dist=loadfile --no-loadscope-reorder --max-worker-restart=0

export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Some images forbid it: then each of the thousand processes of the tests compiles the library anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo unit test test-all test-avx2 test-extended versions lint docs release-check clean

setup: $(STAMP)

# vLLM's dependencies torchvision, torchaudio and torchcodec have no build for this torch on CPU and break
# `import transformers`, so everything but torch comes from pinned lists without them, with --no-deps. torch itself is
# installed with its dependencies: where pip finds only the default build, it needs its CUDA libraries even to be imported.
# The two lists share no package, so they are unpacked side by side.
$(STAMP): $(REQUIREMENTS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "steercap needs Python 3.11 or newer; this is $$($(PYTHON) --version). Use make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "cannot make $(VENV): is the venv module installed (Debian: apt-get install python3-venv)?"; exit 1; }
	@$(SHOWN) -r requirements/torch.txt
	@$(SHOWN) --no-deps -r requirements/cpu.txt & cpu=$$!; $(SHOWN) --no-deps -r requirements/dev.txt; dev=$$?; wait $$cpu && exit $$dev
	@$(PIP) --no-deps --no-build-isolation --editable . 2>/dev/null || $(PIP) --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.steercap-*; touch $@

demo: setup
	$(BIN)/steercap demo --force

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo || $(BIN)/lint-imports

# No engine: about five minutes on two cores.
unit: setup
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL) tests/unit

# What a newcomer runs, and everybody before a commit: about ten minutes on two cores.
test: lint
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL) --durations=15

# That, and then the rest.
test-all: test
	$(BIN)/python -m pytest -m "slow and not extended" $(PARALLEL) --durations=15

# Capture and steering with vLLM's kernels for AVX2, where the processor's own are others: two minutes, one engine.
AVX2 := PYTHONPATH="$(CURDIR)/tests/avx2_alone$${PYTHONPATH:+:$$PYTHONPATH}" ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 STEERCAP_TEST_LIBRARY=_C_AVX2
test-avx2: setup
	@$(BIN)/python -c 'import sys; from steercap.adapters.hardware import AVX2, library; sys.exit(3 * (library() in {"", AVX2}))'; case $$? in \
	0) $(AVX2) $(BIN)/python -m pytest -m "not slow" tests/unit/test_hardware.py tests/engine/test_library.py tests/engine/test_capture.py tests/engine/test_steering.py;; \
	3) echo "test-avx2: make test has run the library that it would run";; \
	*) exit 1;; esac

# What others among those tests stand for: before a release, and after a change of the taps.
test-extended: setup
	$(BIN)/python -m pytest -m extended $(PARALLEL) --durations=15

# The engine's tests on every supported release of vLLM: half an hour, and 2 GB in out/versions.
versions: setup
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/python scripts/test_versions.py $(VERSIONS)

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "the pages are in out/site; open out/site/index.html"

# The dry run of docs/releasing.md: it makes environments of its own for build, twine and the wheel, and keeps nothing.
release-check:
	$(PYTHON) scripts/release.py --dry-run --pip-args="$(PIP_ARGS)"

clean:
	rm -rf $(VENV) out
