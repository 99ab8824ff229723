# CPU:   docker build -t hf-hybrid-ssm .
# CUDA:  docker build -t hf-hybrid-ssm:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 \
#            --build-arg EXTRAS=train,eval,gpu .        and run it with --gpus all
#
# torch's CUDA wheels bring CUDA's libraries, so the machine needs only NVIDIA's driver and container toolkit.
FROM python:3.12-slim

# the C compiler is for the CPU kernels, which are compiled on first use, and for Triton's launchers
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=train,eval
COPY constraints.txt /source/
RUN pip install --no-cache-dir --constraint /source/constraints.txt --extra-index-url "$TORCH_INDEX" torch

COPY pyproject.toml hatch_build.py README.md LICENSE /source/
COPY src /source/src
COPY recipes /source/recipes
RUN pip install --no-cache-dir --constraint /source/constraints.txt --extra-index-url "$TORCH_INDEX" "/source[$EXTRAS]"

RUN useradd --create-home user
USER user
WORKDIR /home/user
CMD ["hf-hybrid-ssm", "doctor"]
