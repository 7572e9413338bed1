#!/usr/bin/env bash
# Installs a wheel as a newcomer does, on machines that have nothing but Python and pip: images made by debootstrap, entered
# by chroot (root; about 4 GB for each torch). `make test-images` calls it.
#
#   scripts/test-images.sh WHEEL [FOLDER OF IMAGES]
#
# Debian 12: its own Python with pip, then uv, torch 2.8 and the newest. Debian 11, the oldest glibc (2.31) that can be had by
# debootstrap: a Python in a prefix of its own, laid out as conda's environments are. What is run in each: `smddp info`, the
# bench, and the script of the first-run page under torchrun.
set -euo pipefail
cd "$(dirname "$0")/.."

wheel=$(realpath "$1")
images=$(realpath -m "${2:-.images}")
mirror=${MIRROR:-http://deb.debian.org/debian}
table=$images/table.md
mkdir -p "$images"
echo '*' >"$images/.gitignore"

# Runs a command line in an image that the rest of the machine does not see: its mounts end with it.
in_image() { # IMAGE COMMAND
    unshare --mount bash -euc '
        image=$1
        mount --bind /dev "$image/dev"
        mount -t tmpfs tmpfs "$image/dev/shm"
        mount -t proc proc "$image/proc"
        cp /etc/resolv.conf "$image/etc/resolv.conf"
        # As every installed machine has it, and debootstrap does not.
        echo "127.0.0.1 localhost $(uname -n)" >"$image/etc/hosts"
        # Whom this machine trusts when it asks an index.
        cp /etc/ssl/certs/ca-certificates.crt "$image/etc/ssl/certs/"
        exec env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 OMP_NUM_THREADS=1 PIP_ROOT_USER_ACTION=ignore \
            PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off \
            PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt \
            chroot "$image" bash -euo pipefail -c "$2"' - "$@"
}

image() { # SUITE PACKAGES
    local at=$images/$1
    if [ ! -e "$at/.ready" ]; then
        rm -rf "$at"
        debootstrap --variant=minbase --include="ca-certificates,$2" "$1" "$at" "$mirror" >"$images/$1.log"
        touch "$at/.ready"
    fi
    mkdir -p "$at/job"
    rm -f "$at"/job/*.whl  # of a run before
    cp "$wheel" "$at/job/"
    PYTHONPATH=tests/pages python3 -c 'import reading; print(reading.scripts("docs/get-started/first-run.md")[0])' >"$at/job/script.py"
}

# What every environment has to do; $bin is its folder of programs, $install what puts packages into it.
readonly TRY='
    $install /job/smddp-*.whl
    $bin/smddp --version
    $bin/smddp info >/job/info.txt
    $bin/smddp-bench all_reduce --nproc 2 -b 8 -e 1M -f 8 | tee /job/bench.txt | grep "Out of bounds values : 0 OK"
    for torch in $torches; do
        $install "$torch" numpy
        $bin/torchrun --standalone --nproc-per-node 4 /job/script.py | tee /job/first-run.txt
        test "$(grep -o "\[4.0, 4.0, 4.0, 4.0\]" /job/first-run.txt | wc -l)" = 4
        $bin/smddp --version
    done
'

try_in() { # SUITE NAME TORCHES SET-UP
    local begun=$SECONDS
    echo "# $1, $2"
    in_image "$images/$1" "torches='$3'; $4; $TRY"
    echo "| $1, glibc $(in_image "$images/$1" "ldd --version | sed -n '1s/.* //p'") | $2 | $3 | $((SECONDS - begun)) |" >>"$table"
}

printf '| image | Python and installer | torch | seconds |\n|---|---|---|---|\n' >"$table"

image bookworm python3,python3-venv,python3-pip
try_in bookworm 'python3 -m venv, pip' 'torch==2.8.* torch' '
    rm -rf /own && python3 -m venv /own
    bin=/own/bin install="/own/bin/pip install -q --upgrade"'
try_in bookworm 'uv venv, uv pip' 'torch' '
    rm -rf /tools /job/uv && python3 -m venv /tools && /tools/bin/pip install -q uv
    /tools/bin/uv -q venv /job/uv
    export VIRTUAL_ENV=/job/uv
    bin=/job/uv/bin install="/tools/bin/uv -q pip install --link-mode copy"'

# A newer Python than Debian 11 has, from Debian 12's source.
image bullseye build-essential,zlib1g-dev,libssl-dev,libffi-dev,libbz2-dev,liblzma-dev,libsqlite3-dev,xz-utils
in_image "$images/bullseye" "
    [ ! -x /opt/conda/envs/job/bin/python3 ] || exit 0
    echo 'deb-src $mirror bookworm main' >/etc/apt/sources.list.d/source.list
    apt-get -qq update
    mkdir -p /build && cd /build && apt-get -qq source --download-only python3.11
    tar xf python3.11_*.orig.tar.?z && cd Python-3.11*
    ./configure --quiet --prefix=/opt/conda/envs/job >configure.log && make -s -j 2 >make.log 2>&1
    make -s install >install.log 2>&1"
try_in bullseye "a prefix as conda's environments have, pip" 'torch' '
    bin=/opt/conda/envs/job/bin
    install="$bin/python3 -m pip install -q --upgrade"'

echo
echo "wheel: $(basename "$wheel")"
cat "$table"
