#!/bin/sh
# A training job's container inside a host of netlab's: `container.sh FOLDER train`. FOLDER is /opt/ml there, and
# FOLDER/machine has the container's private files: settings of SSH, /tmp. It runs as process 1 of a process namespace, in
# a mount namespace that ends with it. The machine's files are not changed.
set -eu
folder=$1
shift
machine=$folder/machine

over() { mount --bind "$machine/$1" "/$1"; }

mkdir -p /opt/ml
[ -e /etc/environment ] || : >/etc/environment
mount --bind "$folder" /opt/ml
machine=/opt/ml/machine
over etc/ssh
over etc/pam.d/sshd
over etc/environment
mount -t tmpfs tmpfs /run
mkdir /run/sshd

# The toolkit's hosts signal a job's end by a file in /tmp. Required paths of the machine's /tmp (a checkout, Python) keep
# their location.
mkdir /run/tmp
mount --bind /tmp /run/tmp
over tmp
for path in $SEEN; do
    case $path in /tmp/*)
        mkdir -p "$path"
        mount --bind "/run$path" "$path" ;;
    esac
done

# Not exec: a shell as process 1 reaps orphans such as orted, which the toolkit of the other hosts monitors. Its end stops
# all processes of the container.
cd /opt/ml
status=0
"$@" >/opt/ml/log 2>&1 </dev/null || status=$?
echo $status >/opt/ml/status
