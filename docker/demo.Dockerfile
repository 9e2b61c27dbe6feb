# hpcgpu from its wheel in a bare Debian: Python and no compiler. `docker run --rm hpcgpu-demo` runs the demo.
# `make image` builds it; the context is a wheel, constraints.txt, and what this host needs to reach a package index.
FROM debian:bookworm-slim AS base
RUN export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 \
 && apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
 && apt-get clean && rm -rf /var/lib/apt/lists/* \
 && useradd -m -s /bin/bash hpc

# CAs and pip's settings of the host stay in this stage. A compiler would be a way round a missing wheel: there is none.
FROM base AS python
COPY . /build/
RUN ! command -v cc && ! command -v gcc && ! command -v mpicc \
 && cp /build/*.crt /usr/local/share/ca-certificates/ 2> /dev/null; update-ca-certificates \
 && export PIP_CONFIG_FILE=/build/pip.conf PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_NO_CACHE_DIR=1 \
 && python3 -m venv /opt/venv \
 && /opt/venv/bin/pip install --quiet --only-binary :all: -c /build/constraints.txt "$(ls /build/*.whl)[mpi-runtime,dashboard]"

FROM base
COPY --from=python /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin
USER hpc
WORKDIR /home/hpc
CMD ["hpcgpu", "demo"]
