"""The main job on our cluster and on its peers, in turn: seconds, CPU seconds, bytes moved and memory of each case.

Cases: the two SVDs of ``hpcgpu demo``, the sum of an array and its transpose, a p2p shuffle of a frame, blocks of which
some are read at each step and others rarely, and 20,000 small tasks; each on a fresh cluster, over tcp and over tls.
Those with ``all fits`` have limits so high that nothing is spilled: so much a case costs without any moves to disk.
Those with ``monitors on`` have Dask's monitors, which spill, pause and end by the memory of the whole process.
``--only`` also takes the names of examples/libraries, run by the Python of ``make libraries``.

``hpcgpu``
    LocalGPUCluster, arrays on simulated GPUs; ``hpcgpu, host arrays`` has them in host memory, as the peer.
``LocalCluster``
    distributed's, with its SpillBuffer; as many bytes of data fit into a worker's memory as into our two tiers.
``hpcgpu, GPU``, ``LocalCUDACluster``
    Arrays of CuPy on this machine's GPUs, with the same limits; ``--gpu-only`` leaves out all others.

``wall_s`` and ``cpu_s`` are of the second time on its cluster: the first, ``first_wall_s``, also fills memory that no
process had for a while. On a virtual machine that gives free pages back to its host this takes 2.2 CPU seconds per GB,
else 0.09; with it a job of 3 GB would measure the machine. CPU seconds are those of all processes, the client's too.
``peak_pss_mib`` is the most memory that all of them had at one moment of the second time, looked at every 0.1 s or as
often as takes 5 % of a core. Bytes ``to_peers`` are without what a shuffle sends by itself.
``pss_mib`` is that of a scheduler and 8 workers without work, started by a program that imports nothing else;
LocalCluster has its scheduler in the client's process, which is counted there and not with us.

One JSON line per figure: the median, and with ``spread`` the least and the most of ``--runs`` runs. Lines with a
``goal`` are our figure divided by the peer's; their spread is that of single runs. The same as a table on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import _figures
import numpy as np
from _sizes import EXAMPLES, IDLE, MIB, NAMES, OF_THE_HOST, SIZES
from _trees import Tree

TIMEOUT_S = 900.0
SIM, GPU = ("hpcgpu", "hpcgpu, host arrays", "LocalCluster"), ("hpcgpu, GPU", "LocalCUDACluster")
PEERS = {"hpcgpu": "LocalCluster", "hpcgpu, host arrays": "LocalCluster", "hpcgpu, GPU": "LocalCUDACluster"}
UNITS = {"wall_s": "s", "first_wall_s": "s", "cpu_s": "s", "cpu_ms_per_task": "ms"}
Values = dict[tuple[str, str, str], list[float]]  # by case, who and measure


class Goal(NamedTuple):
    """What our figure divided by the peer's is to be."""

    measure: str
    at_most: float


def goals(case: str, peer_spills: bool) -> list[Goal]:
    """Return what is wanted of a case."""
    name = case.rpartition(",")[0]
    if name == IDLE:
        return [Goal("pss_mib", 0.7)]
    if name in EXAMPLES:
        return [Goal("wall_s", 1.0), Goal("cpu_s", 1.0)]
    out = [Goal("wall_s", 0.7 if peer_spills else 1.0)]
    return [*out, Goal("cpu_ms_per_task", 1.05)] if name == "small tasks" else out


def measured(who: str, protocol: str, name: str, size: str) -> tuple[dict[str, float], list[float]]:
    """Run one case on one cluster; return its figures, and what it has computed."""
    tree = Tree()
    # workers import the cases by name; what pip has compiled is compiled for us, too
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), *filter(None, [env.get("PYTHONPATH")])))}
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = [sys.executable, "-W", "ignore", "-c", "import _job; _job.main()"]
            tree.start([*run, who, protocol, name, size, folder], env)
            tree.peak_until(b"begin", TIMEOUT_S)
            line, peak = tree.peak_until(b"end", TIMEOUT_S)
            tree.finish(60)
    finally:
        tree.end()
    return figures(name, size, who, json.loads(line), *peak)


def figures(
    name: str, size: str, who: str, found: dict[str, Any], all_mib: float, below_mib: float
) -> tuple[dict[str, float], list[float]]:
    """Return the figures of a run by measure, and what it has computed."""
    if name == IDLE:
        # LocalCluster's scheduler is in the process that it was made in, ours is not
        return {"pss_mib": below_mib if who.startswith("hpcgpu") else all_mib, "pss_mib_with_client": all_mib}, []
    out = {measure: found[measure] for measure in ("wall_s", "first_wall_s", "cpu_s")} | {"peak_pss_mib": all_mib}
    out |= {f"{direction}_mib": nbytes / MIB for direction, nbytes in found["moved"].items()}
    if name == "small tasks":
        out["cpu_ms_per_task"] = found["cpu_s"] / SIZES[size].tasks * 1e3
    return out, found["result"]


def in_turn(options: argparse.Namespace, kinds: Sequence[str]) -> tuple[Values, dict[tuple[str, str], str]]:
    """Run everything; return all values, and why a peer has none."""
    values: Values = {}
    why_not: dict[tuple[str, str], str] = {}
    for run in range(options.runs):
        for name, protocol in ((n, p) for n in options.only for p in options.protocols):
            case, results = f"{name}, {protocol}", {}
            for who in list(kinds)[:: -1 if run % 2 else 1]:
                if name in OF_THE_HOST and who == "hpcgpu, host arrays":
                    continue
                try:
                    found, results[who] = measured(who, protocol, name, options.size)
                except RuntimeError as e:
                    if who.startswith("hpcgpu"):
                        raise
                    why_not[case, who] = f"not measured: {str(e).strip().splitlines()[-1]}"
                    continue
                print(f"{case}, {who}: {found}", file=sys.stderr, flush=True)
                for measure, value in found.items():
                    values.setdefault((case, who, measure), []).append(value)
            first = next(iter(results.values()), [])
            if not all(np.allclose(r, first, rtol=1e-6) for r in results.values()):
                raise RuntimeError(f"{case}: the results differ: {results}")
    return values, why_not


def lines(values: Values, why_not: dict[tuple[str, str], str]) -> Iterator[dict[str, Any]]:
    """Return a figure for each measure, and then one for each goal."""
    for (case, who, measure), found in values.items():
        yield _figures.figure("main_job", case, who, measure, found, UNITS.get(measure, "MiB"))
    for (case, who), why in why_not.items():
        yield _figures.missing("main_job", case, who, "wall_s", why, "s")
    for case, who in dict.fromkeys((case, who) for case, who, _ in values if who in PEERS):
        peer_spills = any(values.get((case, PEERS[who], "host_to_disk_mib"), [0.0]))
        for goal in goals(case, peer_spills):
            ours, theirs = (values.get((case, w, goal.measure), []) for w in (who, PEERS[who]))
            if not ours or len(ours) != len(theirs):
                continue
            each = [a / b for a, b in zip(ours, theirs, strict=True)]
            value = median(ours) / median(theirs)
            met = "met" if value <= goal.at_most else "within the spread" if min(each) <= goal.at_most else "missed"
            line = _figures.figure("main_job", case, f"{who} / {PEERS[who]}", f"{goal.measure}_ratio", each, "")
            yield {**line, "value": round(value, 4), "goal": f"<= {goal.at_most}: {met}"}


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Render for people: a row for each case and cluster, then the goals beside what was measured."""
    rows: dict[tuple[str, str], list[str]] = {}
    out = []
    for f in figures:
        head = f"{f['case']:<20} {f['who']:<34}"
        if "goal" in f:
            out.append(f"{head} {f['measure']:<21} {between(f):<21} goal {f['goal']}")
        elif f["value"] is None:
            out.append(f"{head} {f['why']}")
        elif f["value"]:
            rows.setdefault((f["case"], f["who"]), []).append(f"{f['measure']} {between(f)}")
    return "\n".join(["", *(f"{case:<20} {who:<20} {', '.join(r)}" for (case, who), r in rows.items()), "", *out])


def between(figure: dict[str, Any]) -> str:
    low, high = figure["spread"]
    return f"{figure['value']:g}" + (f" ({low:g} to {high:g})" if figure["runs"] > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", "--repeat", type=int, help="5, with --quick 1")
    parser.add_argument("--only", nargs="+", choices=NAMES + EXAMPLES, default=NAMES, metavar="CASE", help=str(NAMES))
    parser.add_argument("--protocols", nargs="+", choices=("tcp", "tls"), default=("tcp", "tls"))
    parser.add_argument("--size", choices=SIZES, default="full", help="how big the cases are (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="to try: --size quick --protocols tcp --runs 1")
    parser.add_argument("--gpu-only", action="store_true", help="on this machine's GPUs alone")
    parser.add_argument("--json", action="store_true", help="no table on stderr")
    options = parser.parse_args()
    if options.quick:
        options.size, options.protocols = "quick", ("tcp",)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the clusters end, too
    options.runs = options.runs or (1 if options.quick else 5)
    missing = {who: why for who in GPU if (why := why_not_on_gpu(who))}
    kinds = [*(() if options.gpu_only else SIM), *(who for who in GPU if who not in missing)]
    values, why_not = in_turn(options, kinds) if kinds else ({}, {})
    why_not |= {("GPU", who): why for who, why in missing.items()}
    found = list(lines(values, why_not))
    for line in found:
        print(json.dumps(line), flush=True)
    if not options.json:
        print(table(found), file=sys.stderr)


def why_not_on_gpu(who: str) -> str:
    """Return why there are no figures of a GPU; empty if there can be."""
    try:
        import cupy

        cupy.cuda.Device(0).use()
        if who == "LocalCUDACluster":
            import dask_cuda  # noqa: F401
    except Exception as e:  # no CuPy, no driver, no device, no dask-cuda: each has an error of its own
        return f"not measured: {type(e).__name__}: {e}"
    return ""


if __name__ == "__main__":
    main()
