# make demo    train a real model on real text over two ranks, with and without offload, and compare the bits
# make test    run the tests but those marked slow or more, two files at a time where pytest-xdist is installed (WORKERS=0: one
#              after the other). ARGS="-k adam" goes to pytest; ARGS="-m more" and ARGS="-m slow" run the others, as
#              bash .ci/run nightly does
# make quick   tests of one process, in less than a minute: no ranks, no builds, no examples, no other libraries
# make test-all    all tests, those marked more and slow, too
# make crash-test  kill, fill, damage: checkpoints and commits lose nothing. KILLS=300 COMMITS=500 MUTATIONS=20000 FAULTS=200
#                  FULL_DISKS=100 DEAD_RANKS=20
# make gpu-check   on a machine with a CUDA GPU: tests, sanitizer, benchmarks on it (PART=speed, ranks, activations,
#                  kernels, sharding or offload); docs/gpu_check.md
# make docs    the documentation site, into build/site: fails on links and anchors that lead nowhere
# make wheel   dist/shardcore-*.whl for this torch and Python, with CUDA code where nvcc is found, then check it where there is no
#              compiler (needs auditwheel and patchelf); docs/install.md
# make lint    ruff, mypy, import order, C++ format, the include check
# make setup   only prepare: pick or make the Python environment, build the extension in place
# make clean   remove what was built (distclean: .venv too)
#
# Needs python3 with venv and headers, g++ and make. Where python3 already has torch 2.11 or newer, that one is used and nothing
# is downloaded; elsewhere .venv is made, again when PYTHON or TORCH change. Settings: PYTHON=python3.12, TORCH=torch==2.11.0,
# SHARDCORE_CUDA=0|1.

PYTHON ?= python3
TORCH ?= torch==2.13.0
MARKS ?= -m "not slow and not more"
QUICK = -m "not slow and not more and not ranks" $(addprefix --ignore=tests/,build examples tools test_cpp.py test_cli.py optim/test_adam_torch_cases.py)
ARGS ?=
WORKERS ?= 2
KILLS ?= 300
COMMITS ?= 500
MUTATIONS ?= 20000
FAULTS ?= 200
FULL_DISKS ?= 100
DEAD_RANKS ?= 20
PICKED = "$$(cat build/python)"
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help setup demo test quick test-all crash-test gpu-check docs wheel lint clean distclean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

setup:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not on PATH; expected Python 3.11 or newer" \
		"(Debian, Ubuntu: apt-get install python3 python3-venv python3-dev; or make PYTHON=...)" >&2; exit 1; }
	@$(PYTHON) -m tools.setup_env --torch '$(TORCH)'

demo: setup
	@$(PICKED) -m examples.train_gpt --demo

test: setup
	@$(PICKED) -c 'import pytest, numpy' 2>/dev/null || { echo "make test: pytest or numpy is not installed for" \
		"$$(cat build/python); expected both there (pip install pytest hypothesis numpy)" >&2; exit 1; }
	@$(PICKED) -m pytest tests $$($(PICKED) -c 'import xdist' 2>/dev/null && \
		echo "-n $(WORKERS) --dist loadfile --no-loadscope-reorder") $(MARKS) $(ARGS)

quick:
	@$(MAKE) --no-print-directory test MARKS='$(QUICK)'

test-all:
	@$(MAKE) --no-print-directory test MARKS=

crash-test: setup
	@$(foreach name,KILLS COMMITS MUTATIONS FAULTS FULL_DISKS DEAD_RANKS,SHARDCORE_CRASH_$(name)=$($(name))) \
		$(PICKED) -m pytest tests/checkpoint -m crash $(ARGS)

gpu-check:
	@$(PYTHON) -m tools.gpu_check $(if $(PART),--part $(PART)) $(if $(COMMIT),--commit $(COMMIT))

docs:
	@PYTHON=$(PYTHON) bash tools/docs.sh

wheel: setup
	@wheel="$$($(PICKED) -m tools.make_wheel)" && $(PICKED) -m tools.check_wheel "$$wheel"

lint: setup
	@PYTHON=$(PICKED) bash tools/lint.sh

clean:
	rm -rf build dist *.egg-info demo shardcore/_C*.so shardcore/_C.build.json
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
