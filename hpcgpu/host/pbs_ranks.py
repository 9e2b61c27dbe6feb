"""Start one rank on each node of a PBS job, without MPI: ``python -m hpcgpu.host.pbs_ranks TMRSH NODES NAMES ARGV``.

``NODES`` and ``NAMES``, of variables for tasks on other nodes, have commas between. This process becomes rank 0.
"""

import os
import shlex
import subprocess
import sys

from hpcgpu.host import private, process
from hpcgpu.model.allocation import TASK

# A task of PBS has an environment of its own. All users of a node can read command lines, and variables may be secret:
# they are in private files, one for each task, which removes it.
_READ = '. "$0" && rm "$0" && { rmdir "${0%/*}" 2> /dev/null; exec "$@"; }'


def start(tmrsh: str, nodes: list[str], names: list[str], argv: list[str]) -> None:
    """Start the ranks of the other nodes, then become rank 0."""
    commands = [("env", f"{TASK[0]}={rank}", f"{TASK[1]}={len(nodes)}", *argv) for rank in range(len(nodes))]
    if nodes[1:]:
        folder = private.make_folder(private.make_folder(private.user_folder("launches")) / process.mark(os.getpid()))
        lines = "".join(f"export {name}={shlex.quote(os.environ[name])}\n" for name in names)
        files = [folder / node for node in nodes[1:]]
        for file in files:
            private.write(file, lines)
        for node, file, command in zip(nodes[1:], files, commands[1:], strict=True):
            subprocess.Popen((tmrsh, node, "/bin/sh", "-c", _READ, str(file), *command), stdin=subprocess.DEVNULL)
    process.execute(("/usr/bin/env", *commands[0][1:]), os.environ)


if __name__ == "__main__":
    start(sys.argv[1], sys.argv[2].split(","), sys.argv[3].split(","), sys.argv[4:])
