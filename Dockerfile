# The service as a CPU image. The container listens on all addresses, so its configuration must name a TLS certificate,
# a key and at least one bearer token (docs/configuration.md); without them the service refuses to start.
#
#   docker build -t modelpress .
#   docker run -p 8471:8471 -v modelpress-data:/data -v ./modelpress.toml:/etc/modelpress/modelpress.toml:ro modelpress

FROM python:3.11-slim-bookworm AS build
# An index with CPU builds of torch (docker build --build-arg TORCH_INDEX_URL=...): the default index serves CUDA
# builds, which are gigabytes larger and run on the CPU as well.
ARG TORCH_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /app
RUN python -m venv /venv && /venv/bin/python -m pip install --upgrade "pip>=25.1"
COPY constraints.txt ./
RUN /venv/bin/python -m pip install -c constraints.txt ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} torch==2.13.0
COPY pyproject.toml README.md LICENSE ./
COPY modelpress ./modelpress
RUN /venv/bin/python -m pip install -c constraints.txt . --group cpu

FROM python:3.11-slim-bookworm
RUN groupadd --system --gid 10001 modelpress \
    && useradd --system --uid 10001 --gid 10001 --home-dir /data --shell /usr/sbin/nologin modelpress \
    && install -d -o modelpress -g modelpress -m 0700 /data
COPY --from=build /venv /venv
WORKDIR /app
COPY compressors ./compressors
COPY evaluators ./evaluators
COPY service ./service
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 \
    ORT_DISABLE_TELEMETRY=1 MODELPRESS_STORAGE_DATA=/data
# By number, so that Kubernetes can see that it is not root.
USER 10001:10001
VOLUME /data
EXPOSE 8471
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s CMD ["python", "-m", "service.health", "--config", "/etc/modelpress/modelpress.toml"]
ENTRYPOINT ["python", "-m", "service"]
CMD ["--config", "/etc/modelpress/modelpress.toml"]
