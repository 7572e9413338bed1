#!/bin/sh
# A training job's container inside a host of netlab's: `container.sh FOLDER train`. FOLDER is /opt/ml there, and
# FOLDER/machine has what the container has of its own: settings of SSH, /tmp. Process 1 of a process namespace, in a mount
# namespace that ends with it; nothing of the machine's own files is changed.
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

# The toolkit's hosts tell each other by a file in /tmp that a job has ended. What is needed from the machine's own /tmp (a
# checkout there, Python) stays where it is.
mkdir /run/tmp
mount --bind /tmp /run/tmp
over tmp
for path in $SEEN; do
    case $path in /tmp/*)
        mkdir -p "$path"
        mount --bind "/run$path" "$path" ;;
    esac
done

# Not exec: a shell as process 1 reaps what nobody waits for, as orted, which the toolkit of the other hosts watches. When
# it ends, all in the container does.
cd /opt/ml
status=0
"$@" >/opt/ml/log 2>&1 </dev/null || status=$?
echo $status >/opt/ml/status
