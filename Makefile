# make setup      the environment
# make pretrain   train the tiny recipe on 2 ranks; again resumes, FRESH=1 starts over;
#                 SPEC=, RANKS= and ARGS="--set train.steps=480" change it; writes a report at its end
# make test       the test suite, lint and types apart (make lint, make types);
#                 PYTEST="-k name --durations=60" are arguments of pytest
# make test-long  the tests that take seconds of both cores each, which CI runs too
# make check      all four
# make test-faults    a short campaign of faults on a run, which CI runs too
# make museum     published defects of other trainers, shown not to be here: docs/museum.md
# make museum-prove   each of these cases is seen to fail where its defect is put into a copy of Convoy
# make fuzz       random lives of checkpoints, of elastic runs and of their replicas, for SECONDS=300;
#                 MACHINE= is one of the machines; a failure becomes a file of tests/fuzz/seeds
# make test-fake-gpu  CUDA's paths without a GPU: tests on a pretended device with real numbers, and
#                 what layers, steps and recipes launch on fake GPUs of up to 1,024 ranks
# make test-kernels   the kernels for CUDA, in Triton's interpreter and compiled, without a GPU
# make test-megablocks  MegaBlocks as released, on a CPU: its kernels in Triton's interpreter
# make test-foreign  suites that others wrote, over Convoy: those that packages have; FOREIGN= are
#                 arguments of python -m tests.foreign, such as FOREIGN=sample-order
# make test-engines  runs on a real Slurm and Ray of this machine, which it installs, and a real
#                 Prometheus and Chromium that look at runs
# make chaos      the tiny recipe under 30 random faults, and without; OUT= is a new folder
# make gpu        on a machine with CUDA devices: all that needs them, in an hour at most, and a report
#                 in OUT=, runs/gpu; again goes on where it stopped; GPUS= is how many, by default all

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
RANKS ?= 2
CUDA_WHEELS ?= https://download.pytorch.org/whl/cu129
SPEC ?= tools/recipes/stdlib-tiny.toml
FRESH ?= 0
ARGS ?=
export OMP_NUM_THREADS ?= 1
# Interpreters start in less time where bytecode is kept; the tests are collected in half the time.
export PYTHONDONTWRITEBYTECODE :=
# torchrun's default shared store can leave a restart hanging; each attempt gets its own.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE := 1
# After SIGTERM ranks finish a step and commit a checkpoint before they are killed.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT ?= 600

.PHONY: setup pretrain chaos gpu test test-long museum museum-prove test-fake-gpu test-kernels test-megablocks test-all test-faults test-engines examples lint types check megablocks docs/spec.md docs/families.md docs/metrics.md docs/museum.md test-foreign fuzz clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,lint]"
	touch $@

# Which torch pip finds depends on the index; nothing else says that a GPU stays unused.
setup: $(VENV)/.ready
	@{ command -v nvidia-smi || test -e /dev/nvidia0; } >/dev/null 2>&1 || exit 0; \
	grep -qs '^cuda.*= None' $(VENV)/lib/python*/site-packages/torch/version.py || exit 0; \
	echo "This machine has an NVIDIA GPU, and the installed torch is built without CUDA. To change it:"; \
	echo "  $(PY) -m pip uninstall -y torch &&" \
	    "$(PY) -m pip install -c constraints.txt torch --index-url $(CUDA_WHEELS)"

pretrain: setup
	$(PY) -m convoy prepare $(SPEC) $(ARGS) $(if $(filter 1,$(FRESH)),--reset)
	$(PY) -m torch.distributed.run --standalone --nproc-per-node $(RANKS) \
	    tools/pretrain.py $(SPEC) $(ARGS) --report

chaos: OUT ?= runs/chaos
chaos: setup
	$(PY) -m convoy prepare $(SPEC) $(ARGS)
	$(PY) -m convoy chaos $(SPEC) $(OUT) $(ARGS) --json $(OUT).json

GPUS ?= 0
gpu: OUT ?= runs/gpu
gpu: setup
	$(PY) -m bench.gpu --gpus $(GPUS) --seconds 3600 --out $(OUT)

# One process imports and collects; its forks run the tests.
test: setup
	$(PY) -m tests.lanes $(PYTEST)

test-long: setup
	$(PY) -m tests.lanes -m "long and not slow" $(PYTEST)

museum: setup
	$(PY) -m tests.lanes tests/museum -m museum $(PYTEST)

museum-prove: setup
	$(PY) -m tests.museum --prove

# Of float8 a CPU has no kernel, and grouped_mm takes no float32 on CUDA.
test-fake-gpu: setup
	CONVOY_TEST_DEVICE=cuda $(PY) -m pytest tests/test_cuda.py tests/runs/test_layouts.py \
	    tests/runs/test_exact.py tests/pretrain/parallelize/test_pipeline.py tests/pretrain/optim \
	    -k "not float8 and not (unequal and grouped_mm)" $(PYTEST)
	$(PY) -m pytest -m "" tests/fake_gpu tests/bench/test_gpu.py \
	    --ignore tests/fake_gpu/test_memory.py $(PYTEST)

# Triton stays out of $(VENV): torch behaves otherwise where it is.
TRITON := build/triton
$(TRITON)/.ready: $(VENV)/.ready
	rm -rf $(TRITON)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $(TRITON) triton==3.9.0
	touch $@

# When it is imported Triton decides whether it interprets kernels: a run for each.
test-kernels: setup $(TRITON)/.ready
	PYTHONPATH=$(CURDIR):$(CURDIR)/$(TRITON) TRITON_INTERPRET=1 $(PY) -m pytest -rs \
	    tests/moe/test_kernels.py tests/router/test_kernels.py \
	    tests/pretrain/model/test_rotary_kernel.py $(PYTEST)
	PYTHONPATH=$(CURDIR):$(CURDIR)/$(TRITON) $(PY) -m pytest -rs tests/test_kernels_compiled.py $(PYTEST)

# What pip builds here lacks the CUDA parts: into a folder of its own, and not into pip's cache.
MEGABLOCKS := "megablocks==0.10.0"
WITH_MEGABLOCKS := "stanford-stk==0.7.1" "grouped_gemm==0.3.0"
build/megablocks/.ready: $(VENV)/.ready
	rm -rf $(@D)
	PYTHONPATH=$(CURDIR)/tests/support/megablocks/without_cuda TORCH_CUDA_ARCH_LIST=9.0 \
	    $(PY) -m pip install --quiet --no-deps --no-build-isolation --no-cache-dir \
	    --target $(@D) $(MEGABLOCKS) $(WITH_MEGABLOCKS)
	touch $@

test-megablocks: build/megablocks/.ready $(TRITON)/.ready
	PYTHONPATH=tests/support/megablocks/compiled:build/megablocks:$(TRITON) TRITON_INTERPRET=1 \
	    $(PY) -m pytest tests/interop/test_megablocks.py $(PYTEST)

# Fetched into build/foreign, and never committed.
FOREIGN ?=
test-foreign: setup
	$(PY) -m tests.foreign $(FOREIGN)

test-all: setup
	$(PY) -m pytest -m ""

SECONDS ?= 300
fuzz: setup
	$(PY) -m tests.fuzz --seconds $(SECONDS) $(if $(MACHINE),--machine $(MACHINE))

test-faults: setup
	$(PY) -m pytest -m slow tests/convoy/chaos/test_campaign.py -k short

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: setup
	$(PY) -m mypy

check: lint types test test-long

# On a CUDA machine. The pins of megablocks 0.10 are older than its code: install without them. CUDA 13's
# CUB has no argument debug_synchronous.
megablocks: SOURCE := build/megablocks-source
megablocks: setup
	@$(PY) -c "import torch, sys; sys.exit(0 if torch.cuda.is_available() else \
	    'make megablocks needs a CUDA device: megablocks does not import without one')"
	rm -rf $(SOURCE)
	$(PY) -m pip download --no-deps --no-build-isolation --no-binary megablocks --dest $(SOURCE) $(MEGABLOCKS)
	tar -xzf $(SOURCE)/megablocks-*.tar.gz -C $(SOURCE) --strip-components 1
	sed -z -i 's/stream,[[:space:]]*debug_synchronous)/stream)/g' $(SOURCE)/csrc/cumsum.h
	$(PY) -m pip install --no-deps --no-build-isolation --no-cache-dir ./$(SOURCE) $(WITH_MEGABLOCKS)
	$(PY) -m pip install triton

docs/spec.md: setup
	$(PY) -m docs.spec_page > $@

docs/families.md: setup
	$(PY) -m docs.families_page > $@

docs/museum.md: setup
	$(PY) -m docs.museum_page > $@

docs/metrics.md: setup
	$(PY) -m docs.metrics_table

# The jobs in examples/, rendered from examples/cluster.toml.
examples: setup
	$(PY) -m convoy launch examples/cluster.toml --on slurm --output examples/slurm.sbatch
	$(PY) -m convoy launch examples/cluster.toml --on ray --output examples/ray_job.py
	$(PY) -m convoy launch examples/cluster.toml --on kubernetes --output examples/trainjob.yaml \
	    --set launch.image=registry.example/convoy:0.1.0

# A real Slurm, Ray, Prometheus and Chromium on this machine. They need root for apt, once.
test-engines: setup
	command -v slurmctld >/dev/null || apt-get install -y slurmctld slurmd slurm-client munge
	command -v prometheus >/dev/null || apt-get install -y prometheus
	command -v chromium >/dev/null || apt-get install -y chromium
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[engines]"
	$(PY) -m pytest -m engine -rs

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
