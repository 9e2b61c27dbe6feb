#!/bin/bash
# Whether workers and a script copy large values from each other's memory where Yama restricts it (ptrace_scope 0 to 2).
# As root, on Debian: apt-get install user-mode-linux, whose kernel has Yama. It reads this machine's files, and writes none.
set -e
here=$(cd "$(dirname "$0")/.." && pwd)
if [ $$ != 1 ]; then
  exec linux.uml mem=1500M rootfstype=hostfs root=/dev/root ro "init=$here/scripts/yama.sh" con=null con0=null,fd:1 ssl=null < /dev/null
fi
mount -t proc proc /proc
mkdir -p /dev/shm
for folder in /tmp /dev/shm; do mount -t tmpfs tmpfs $folder; done
ip link set lo up
cat > /tmp/copies.py << 'END'
import numpy as np
from distributed import Client
from hpcgpu.deploy.network.node_copies import this_process
with Client() as client:
    client.wait_for_workers(2)
    a, b = client.scheduler_info(n_workers=-1)["workers"]
    parts = [client.submit(np.full, 2**20, 7, workers=[a], pure=False) for _ in range(4)]
    assert client.submit(lambda xs: sum(int(x[-1]) for x in xs), parts, workers=[b]).result() == 28
    client.gather(parts)
    by_worker = client.run(lambda: __import__("hpcgpu.deploy.network.node_copies", fromlist=["x"]).this_process.copied_bytes)
    print("MiB copied by the workers:", sorted(n >> 20 for n in by_worker.values()), "by the script:", this_process.copied_bytes >> 20)
END
export HOME=/tmp TMPDIR=/tmp PYTHONPATH=$here PYTHONDONTWRITEBYTECODE=1
for scope in 0 1 2; do
  echo $scope > /proc/sys/kernel/yama/ptrace_scope
  echo "ptrace_scope $scope"  # root may trace everything but for a capability
  words=(--bounding-set -sys_ptrace --inh-caps -sys_ptrace "$here/.venv/bin/python" -m hpcgpu run --gpus sim:2x64MiB)
  setpriv "${words[@]}" --no-dashboard --death-timeout 600 /tmp/copies.py 2>&1 | grep -e copied -e Error -e "by the connection" || :
done
echo o > /proc/sysrq-trigger
sleep 60
