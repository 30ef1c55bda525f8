# syntax=docker/dockerfile:1
# docker build --build-arg DEVICE=cpu|cuda|hpu -t gearshift .
# It listens on all addresses, so that without keys (GEARSHIFT_API_KEYS_FILE) it answers probes and metrics only.
# `gearshift serve` in it wants keys, too, or GEARSHIFT_HTTP_ANONYMOUS=true.
# docker run -v ./models:/models -e KAFKA_BOOTSTRAP_SERVERS=broker:9092 gearshift worker --models /models/models.yaml
# Another port: -e GEARSHIFT_HTTP_PORT=9000, which its health check asks too.
# Models that are named as the hub has them are downloaded to /hub: -v hub:/hub keeps them, and -e HF_HUB_OFFLINE=1 asks nobody.
# Its user can't write beside the packages, so what Python compiles must be there: UV_COMPILE_BYTECODE.
# deploy/local/image builds it without a daemon, and shows it at work.
ARG DEVICE=cpu
# Bases are taken by digest where that is said: --build-arg PYTHON_BASE=python@sha256:..., and HPU_BASE the same way.
ARG PYTHON_BASE=python:3.11-slim-bookworm
# The vendor's PyTorch image that vllm-gaudi 0.26.0 is released for: Gaudi software 1.24.1, which the driver must match.
ARG HPU_BASE=vault.habana.ai/gaudi-docker/1.24.1/ubuntu24.04/habanalabs/pytorch-installer-2.11.0:latest

# What builds stays behind: of each stage but the last only what is copied from it gets into the image.
# uv's index can be set with --build-arg UV_DEFAULT_INDEX=..., a bundle of certificates of one's own with SSL_CERT_FILE.
FROM ${PYTHON_BASE} AS tools
ARG SSL_CERT_FILE
ARG UV_DEFAULT_INDEX
COPY deploy/lock/uv/requirements.txt /tmp/uv.txt
RUN python -m venv /opt/tools \
    && PIP_CERT=${SSL_CERT_FILE:-} PIP_INDEX_URL=${UV_DEFAULT_INDEX:-} \
        /opt/tools/bin/pip install --no-cache-dir --no-deps --require-hashes -r /tmp/uv.txt
ENV PATH=/opt/tools/bin:$PATH UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy

FROM tools AS wheel
COPY . /tmp/gearshift
RUN uv build --wheel --no-build-isolation --python /opt/tools/bin/python --out-dir /wheel /tmp/gearshift

# cpu: PyPI's torch is CUDA's, so its libraries are left out and stood in for. --build-arg UV_TORCH_BACKEND=cpu takes the
# CPU's own build from PyTorch's index, whose hashes no lock knows: smaller by some 500 MB, and without a stand-in.
FROM tools AS packages-cpu
RUN apt-get update && apt-get install --no-install-recommends -y gcc libc6-dev
ARG SSL_CERT_FILE
ARG UV_DEFAULT_INDEX
ARG UV_TORCH_BACKEND
COPY deploy/lock/image-cpu.txt /tmp/lock.txt
RUN --mount=type=cache,target=/root/.cache/uv \
    uv venv --python "$(command -v python3)" /opt/gearshift \
    && export VIRTUAL_ENV=/opt/gearshift \
    && if [ -n "${UV_TORCH_BACKEND:-}" ]; then \
        torch=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' /tmp/lock.txt) \
        && sed -i '/^torch==/,/[^\\]$/d' /tmp/lock.txt \
        && uv pip install --no-deps "$torch"; \
    fi \
    && env -u UV_TORCH_BACKEND uv pip install --no-deps --require-hashes -r /tmp/lock.txt
COPY deploy/image/cpu_only.py /tmp/cpu_only.py
RUN python /tmp/cpu_only.py /opt/gearshift

# g++: torch.compile's code for a CPU. libtcmalloc and libiomp (which the environment has) are preloaded, as vLLM asks.
FROM ${PYTHON_BASE} AS device-cpu
RUN apt-get update \
    && apt-get install --no-install-recommends -y g++ libnuma1 libgomp1 libtcmalloc-minimal4 util-linux \
    && apt-get clean && rm -rf /var/lib/apt/lists/* /usr/bin/*-lto-dump-* /usr/lib/gcc/*/*/lto1
COPY --from=packages-cpu /opt/gearshift /opt/gearshift
ENV PATH=/opt/gearshift/bin:$PATH \
    VIRTUAL_ENV=/opt/gearshift \
    LD_PRELOAD=libtcmalloc_minimal.so.4:/opt/gearshift/lib/libiomp5.so

# cuda: vLLM's own wheels bring CUDA's libraries; the host brings the driver.
FROM tools AS packages-cuda
ARG SSL_CERT_FILE
ARG UV_DEFAULT_INDEX
COPY deploy/lock/image-cuda.txt /tmp/lock.txt
RUN --mount=type=cache,target=/root/.cache/uv \
    uv venv --python "$(command -v python3)" /opt/gearshift \
    && VIRTUAL_ENV=/opt/gearshift uv pip install --no-deps --require-hashes -r /tmp/lock.txt

FROM ${PYTHON_BASE} AS device-cuda
RUN apt-get update \
    && apt-get install --no-install-recommends -y g++ \
    && apt-get clean && rm -rf /var/lib/apt/lists/*
COPY --from=packages-cuda /opt/gearshift /opt/gearshift
ENV PATH=/opt/gearshift/bin:$PATH \
    VIRTUAL_ENV=/opt/gearshift

# hpu: the vendor's image has the driver's libraries, its torch, habana-torch-plugin and the quantizer. vLLM is built
# for no device from source and vllm-gaudi beside it, both as vllm-gaudi's own Dockerfile does; what they need is locked.
FROM ${HPU_BASE} AS device-hpu
ARG VLLM_VERSION=0.26.0
ARG UV_DEFAULT_INDEX
COPY deploy/lock/image-hpu.txt /tmp/lock.txt
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    /opt/tools/bin/uv pip install --system --break-system-packages --compile-bytecode --no-cache --no-deps \
        --require-hashes -r /tmp/lock.txt
RUN git clone --depth 1 --branch "v${VLLM_VERSION}" https://github.com/vllm-project/vllm.git /tmp/vllm \
    && VLLM_TARGET_DEVICE=empty pip install --no-cache-dir --no-deps --no-build-isolation /tmp/vllm \
    && git clone --depth 1 --branch "v${VLLM_VERSION}" https://github.com/vllm-project/vllm-gaudi.git /tmp/vllm-gaudi \
    && VLLM_TARGET_DEVICE=hpu pip install --no-cache-dir --no-deps --no-build-isolation /tmp/vllm-gaudi \
    && rm -rf /tmp/vllm /tmp/vllm-gaudi

FROM device-${DEVICE} AS gearshift
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    /opt/tools/bin/uv pip install --python "$(command -v python)" --break-system-packages --compile-bytecode \
        --no-cache --no-index --no-deps /wheel/*.whl \
    && useradd --create-home --uid 10001 gearshift \
    && install --directory --owner gearshift /hub
ENV PYTHONUNBUFFERED=1 \
    HF_HOME=/hub \
    HF_MODULES_CACHE=/home/gearshift/.cache/hf_modules \
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
