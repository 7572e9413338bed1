#!/bin/sh
# Installs Debian's Open MPI, SSH server and Slurm where that can be done without asking, for `make test-launch`; tests
# that miss one are skipped and say so.
set -u
packages="openmpi-bin openssh-server slurmctld slurmd slurm-client"
PATH="$PATH:/usr/sbin"
missing=
for program in mpirun sshd slurmctld slurmd srun; do
    command -v $program >/dev/null 2>&1 || missing="$missing $program"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    # Their daemons are not to be started: the tests start their own.
    get() { DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -q -o Acquire::Retries=5 -o DPkg::Lock::Timeout=120 "$@"; }
    # shellcheck disable=SC2086 # a list
    { get install -y $packages || { get update && get install -y $packages; }; } >/dev/null 2>&1 && exit 0
fi
echo "missing:$missing; the tests with them are skipped (apt-get install $packages)" >&2
