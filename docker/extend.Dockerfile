# One of AWS's deep learning images for training, with smddp in place of the libraries whose paths it has.
#
#   make wheel-portable
#   docker build -f docker/extend.Dockerfile --build-arg SOURCE=examples --build-arg PROGRAM=ddp.py -t train .
#
# docs/guides/containers.md says more.
ARG BASE=public.ecr.aws/deep-learning-containers/pytorch:2.11-cu130-amzn2023-sagemaker
FROM ${BASE}

COPY dist/portable/smddp-*.whl /tmp/smddp/
RUN pip uninstall --yes smdistributed-dataparallel smdistributed-modelparallel \
    && pip install --no-cache-dir --no-deps "/tmp/smddp/smddp-"*_"$(uname -m)".whl \
    && rm -r /tmp/smddp

# What a job of this image finds, and whether its ranks can meet at all: an image that cannot is not made.
RUN python -c "import smdistributed.dataparallel.torch.torch_smddp" && smddp doctor

# The script, for jobs that bring none of their own (those of an estimator do).
ARG SOURCE=examples
ARG PROGRAM=ddp.py
COPY ${SOURCE} /opt/ml/code
ENV SAGEMAKER_SUBMIT_DIRECTORY=/opt/ml/code SAGEMAKER_PROGRAM=${PROGRAM}
