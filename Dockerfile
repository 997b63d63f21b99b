# An image with this trainer.
#
#   docker build -t lit-async-rl .                                  # CPU
#   docker build -t lit-async-rl --build-arg TORCH_INDEX= .         # CUDA, from torch's own wheels
#   docker build -t lit-async-rl --build-arg TORCH_INDEX= --build-arg EXTRAS=vllm,peft,ray .
#   docker run --rm -v "$PWD/runs:/work/runs" lit-async-rl train --config configs/quickstart.yaml
#   docker run --rm --gpus all lit-async-rl env
#
# CUDA needs the driver and the NVIDIA Container Toolkit on the host, and nothing of CUDA in the image but the wheels.
# Code rewards run programs in namespaces, which Docker forbids by default; a run with such a reward then ends at its start,
# unless `allow_unsandboxed: true` accepts resource limits only. `docker run --security-opt seccomp=unconfined` allows them.
FROM python:3.11-slim
ARG TORCH_INDEX="--index-url https://download.pytorch.org/whl/cpu"
ARG EXTRAS="peft,ray,agents"
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
# torch.compile, which FSDP's examples and some attention kernels use, needs a compiler
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN pip install "torch>=2.11,<2.14" ${TORCH_INDEX}
WORKDIR /work
COPY pyproject.toml README.md LICENSE ./
COPY lit_async_rl lit_async_rl
COPY callbacks callbacks
COPY configs configs
COPY scripts scripts
COPY examples examples
RUN pip install -e ".[${EXTRAS}]"
ENTRYPOINT ["lit-async-rl"]
CMD ["--help"]
