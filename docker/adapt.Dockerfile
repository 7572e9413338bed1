# Any image with Python 3.10 or later and apt, made one that SageMaker's training service, mpirun and Kubernetes can run.
#
#   make wheel-portable
#   docker build -f docker/adapt.Dockerfile -t train .                                     # processors
#   docker build -f docker/adapt.Dockerfile --build-arg TORCH_INDEX=https://pypi.org/simple \
#       --build-arg EFA_INSTALLER=latest -t train .                                        # CUDA and EFA
#
# docs/guides/containers.md says more.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}
SHELL ["/bin/bash", "-eo", "pipefail", "-c"]

# Open MPI and an SSH server: the toolkit starts the ranks of several hosts by them. The toolkit
# compiles a small library in each job. Versions are those of the base image's release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        build-essential ca-certificates curl libopenmpi-dev openmpi-bin openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/*

# The installer's version, or "latest"; nothing without. The kernel's part and the limits are the host's, and no device is
# there to verify while an image is made. It runs in its own folder.
ARG EFA_INSTALLER=
# hadolint ignore=DL3003
RUN if [ -n "${EFA_INSTALLER}" ]; then \
        mkdir /tmp/efa \
        && curl -fsSL "https://efa-installer.amazonaws.com/aws-efa-installer-${EFA_INSTALLER}.tar.gz" \
            | tar -xz -C /tmp/efa \
        && cd /tmp/efa/aws-efa-installer \
        && apt-get update \
        && ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify \
        && rm -rf /tmp/efa /var/lib/apt/lists/* \
        && ldconfig; \
    fi

# torch for processors; that of https://pypi.org/simple has CUDA with it. One that is there already stays.
ARG TORCH="torch>=2.8"
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" "${TORCH}" \
    && pip install --no-cache-dir numpy mpi4py==4.1.2 sagemaker-pytorch-training==3.0.0 sagemaker-training==5.1.4

COPY dist/portable/smddp-*.whl /tmp/smddp/
RUN pip install --no-cache-dir --no-deps "/tmp/smddp/smddp-"*_"$(uname -m)".whl && rm -r /tmp/smddp

# Hosts of a job reach each other with one key, that of the image: who has the image can enter its jobs' hosts, if a
# network leads there.
RUN mkdir -p /run/sshd /root/.ssh \
    && ssh-keygen -q -t ed25519 -N "" -f /root/.ssh/id_ed25519 \
    && cp /root/.ssh/id_ed25519.pub /root/.ssh/authorized_keys \
    && printf 'Host *\n    StrictHostKeyChecking no\n    UserKnownHostsFile /dev/null\n    LogLevel ERROR\n' \
        > /root/.ssh/config \
    && chmod 600 /root/.ssh/* \
    # A container's kernel may not let a login have a number of its own.
    && sed -i 's/session *required *pam_loginuid.so/session optional pam_loginuid.so/' /etc/pam.d/sshd

# What a job of this image finds, and whether its ranks can meet at all: an image that cannot is not made.
RUN python -c "import smdistributed.dataparallel.torch.torch_smddp" && smddp doctor

# The script, for jobs that bring none of their own (those of an estimator do).
ARG SOURCE=examples
ARG PROGRAM=ddp.py
COPY ${SOURCE} /opt/ml/code
ENV SAGEMAKER_SUBMIT_DIRECTORY=/opt/ml/code \
    SAGEMAKER_PROGRAM=${PROGRAM} \
    SAGEMAKER_TRAINING_MODULE=sagemaker_pytorch_container.training:main
WORKDIR /opt/ml/code
# The toolkit's program; the service names it as well.
CMD ["train"]
