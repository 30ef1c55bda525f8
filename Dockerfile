# syntax=docker/dockerfile:1
# docker build --build-arg DEVICE=cpu|cuda|hpu -t gearshift .
# It listens on all addresses, so that without keys (GEARSHIFT_API_KEYS_FILE) it answers probes and metrics only.
# docker run -v ./models:/models -e KAFKA_BOOTSTRAP_SERVERS=broker:9092 gearshift worker --models /models/models.yaml
# Another port: -e GEARSHIFT_HTTP_PORT=9000, which its health check asks too.
# Models that are named as the hub has them are downloaded to /hub: -v hub:/hub keeps them, and -e HF_HUB_OFFLINE=1 asks nobody.
# Its user can't write beside the packages, so what Python compiles must be there: UV_COMPILE_BYTECODE, as pip does.
ARG DEVICE=cpu
# Bases are taken by digest where that is said: --build-arg PYTHON_BASE=python@sha256:..., and HPU_BASE the same way.
ARG PYTHON_BASE=python:3.11-slim-bookworm
# The vendor's PyTorch image that vllm-gaudi 0.26.0 is released for: Gaudi software 1.24.1, which the driver must match.
ARG HPU_BASE=vault.habana.ai/gaudi-docker/1.24.1/ubuntu24.04/habanalabs/pytorch-installer-2.11.0:latest

# cpu: from the lock. uv's index can be set with --build-arg UV_DEFAULT_INDEX=...
FROM ${PYTHON_BASE} AS device-cpu
RUN apt-get update \
    && apt-get install --no-install-recommends -y g++ libnuma1 libgomp1 util-linux \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir 'uv>=0.9'
ENV UV_COMPILE_BYTECODE=1
COPY deploy/lock/cpu-vllm-0.32.txt /tmp/lock.txt
RUN --mount=type=cache,target=/root/.cache/uv uv pip install --system --no-deps --require-hashes -r /tmp/lock.txt

# cuda: vLLM's own wheels bring CUDA's libraries; the host brings the driver.
FROM ${PYTHON_BASE} AS device-cuda
RUN apt-get update \
    && apt-get install --no-install-recommends -y g++ \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir 'uv>=0.9'
ENV UV_COMPILE_BYTECODE=1
COPY pyproject.toml README.md LICENSE /tmp/gearshift/
RUN --mount=type=cache,target=/root/.cache/uv uv pip install --system -r /tmp/gearshift/pyproject.toml --extra cuda

# hpu: the vendor's image has the driver's libraries, its torch, habana-torch-plugin and the quantizer. vLLM is built
# for no device from source and vllm-gaudi beside it, both as vllm-gaudi's own Dockerfile does.
FROM ${HPU_BASE} AS device-hpu
ARG VLLM_VERSION=0.26.0
RUN pip install --no-cache-dir 'uv>=0.9'
ENV UV_COMPILE_BYTECODE=1
RUN git clone --depth 1 --branch "v${VLLM_VERSION}" https://github.com/vllm-project/vllm.git /tmp/vllm \
    && sed '/^torch/d' /tmp/vllm/requirements/build/cuda.txt > /tmp/build.txt \
    && pip install --no-cache-dir -r /tmp/build.txt \
    && VLLM_TARGET_DEVICE=empty pip install --no-cache-dir --no-build-isolation /tmp/vllm \
    && git clone --depth 1 --branch "v${VLLM_VERSION}" https://github.com/vllm-project/vllm-gaudi.git /tmp/vllm-gaudi \
    && VLLM_TARGET_DEVICE=hpu pip install --no-cache-dir --no-build-isolation /tmp/vllm-gaudi \
    && rm -rf /tmp/vllm /tmp/vllm-gaudi /tmp/build.txt
COPY pyproject.toml README.md LICENSE /tmp/gearshift/
RUN uv pip install --system -r /tmp/gearshift/pyproject.toml

FROM device-${DEVICE} AS gearshift
COPY . /opt/gearshift
RUN uv pip install --system --no-deps /opt/gearshift \
    && useradd --create-home --uid 10001 gearshift \
    && install --directory --owner gearshift /hub
ENV PYTHONUNBUFFERED=1 \
    HF_HOME=/hub \
    GEARSHIFT_HTTP_HOST=0.0.0.0 \
    GEARSHIFT_HTTP_PORT=8080
USER 10001
WORKDIR /home/gearshift
EXPOSE 8080
# Loading a model may take minutes: unhealthy is what does not come up, or what stalls.
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import os, ssl, urllib.request as u; s = 's' if os.environ.get('GEARSHIFT_HTTP_SSL_CERTFILE') else ''; \
        port = os.environ['GEARSHIFT_HTTP_PORT']; context = ssl._create_unverified_context() if s else None; \
        u.urlopen(f'http{s}://127.0.0.1:{port}/health', timeout=4, context=context)"]
# The worker drains on SIGTERM: give it longer than GEARSHIFT_SHUTDOWN_TIMEOUT_S.
STOPSIGNAL SIGTERM
ENTRYPOINT ["gearshift"]
CMD ["worker", "--models", "/models/models.yaml"]
