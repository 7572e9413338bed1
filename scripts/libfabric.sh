#!/bin/sh
# Installs libfabric where that can be done without asking, for the tests that run over it; without it they are
# skipped and say so. smddp itself needs no libfabric.
set -u
ldconfig -p 2>/dev/null | grep -q 'libfabric\.so\.1 ' && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    get() { apt-get -q -o Acquire::Retries=5 -o DPkg::Lock::Timeout=120 "$@"; }
    { get install -y libfabric1 || { get update && get install -y libfabric1; }; } >/dev/null 2>&1 && exit 0
fi
echo "libfabric is not installed: the tests over it are skipped (apt-get install libfabric1)" >&2
