"""The questions of ``docs/benchmarks.md``, answered from the figures: a finding, a chart and a table each.

A sentence is computed of the figures, or true of any.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bench import FIGURES, Row
from bench_model import Figure, Figures, Mark, Panel, Question, counted, listed, ranged, short, span, to_figure

RANKS, ALONE = "8 workers, 1 + 8 ranks", "8 workers, one rank"
SLURM = "8 workers, 2 nodes"
MAKE, READ = "make 40 x 64 MiB", "read 40 x 64 MiB"
STORES = {
    "hpcgpu, host to disk": "hpcgpu, host to disk",
    "hpcgpu, device to host": "hpcgpu, device to host",
    "SpillBuffer, host to disk": "distributed's SpillBuffer",
    "dict": "nothing spills (dict)",
}
POLICIES = {
    "Belady": "Belady (knows the future)",
    "hpcgpu": "hpcgpu",
    "hpcgpu, no priorities": "hpcgpu, no priorities",
    "LRU": "LRU",
    "FIFO": "FIFO",
}
WAYS = {
    "hpcgpu, tls": "hpcgpu, tls",
    "hpcgpu, tcp": "hpcgpu, tcp",
    "hpcgpu, tls, node_copies=False": "hpcgpu, tls, node_copies=False",
    "hpcgpu, tcp, node_copies=False": "hpcgpu, tcp, node_copies=False",
    "hpcgpu, ucx": "hpcgpu, ucx",
    "LocalCluster, tls": "LocalCluster, tls",
    "LocalCluster, tcp": "LocalCluster, tcp",
}
UCX_BESIDE = ("hpcgpu, tls", "hpcgpu, tcp", "hpcgpu, ucx", "hpcgpu, ucx, polling")
JOBS = ("tall SVD", "low-rank SVD", "transpose-sum", "p2p shuffle", "hot and cold", "small tasks")
FITS = ("tall SVD, all fits", "transpose-sum, all fits", "hot and cold, all fits")
CLUSTERS = {
    "hpcgpu": "hpcgpu, simulated GPUs",
    "hpcgpu, host arrays": "hpcgpu, arrays in host memory",
    "LocalCluster": "distributed's LocalCluster",
}
CORE_RULES = (
    *("hpcgpu", 'hpcgpu, cores="local"', "all local cores (rrun.bind)", "mpibind-like", "block of cores", "bindpcie"),
    *("socket i*P/G", "dask cuda worker"),
)
PORT_RULES = ("hpcgpu", "best class (rrun.bind)", "all", "nearest", "first of the list")
CROWD = "1000 workers of 250 jobs join and leave"


def start(f: Figures) -> Question:
    """Compare the start of eight workers."""
    here = [
        Mark(row["who"] + (", one rank" if row["case"] == ALONE else ""), row["who"], to_figure(row))
        for row in f.select("startup", "wall_s", lambda row: "without" not in row["who"])
    ]
    there = [
        Mark(r["who"], r["who"], to_figure(r)) for r in f.select("batch", "wall_s_to_8_workers", lambda r: bool(r))
    ]
    cost, slurm = (
        lambda m, who: f.value("startup", RANKS, m, who),
        lambda who: f.value("batch", SLURM, "cpu_s_per_worker", who),
    )
    nannies = [m.figure.value for m in here if m.label in ("dask worker nanny", "dask-mpi Nanny")]
    queued = [m.figure.value for m in there if m.label.endswith(", nanny")]
    ours, batch = here[0].figure.value, there[0].figure.value
    return Question(
        "start",
        "How long until the workers are ready?",
        [
            Panel("bars", "Seconds until 8 workers are registered, on one machine", tuple(here), colours="peers"),
            Panel(
                "bars",
                "Seconds from the request until 8 workers are registered, 2 nodes of a Slurm",
                tuple(there),
                colours="peers",
            ),
        ],
        1,
        f"On one machine 8 workers are ready {short(ours)} s after the start; with `dask worker` or dask-mpi, with "
        f"nannies as by default, after {span(nannies)} s. On two nodes of a Slurm it is {short(batch)} s beside "
        f"{span(queued)} s. Without a nanny nothing replaces a worker that dies.",
        f"Horizontal bars. On one machine hpcgpu has 8 workers after {short(ours)} s, the others with nannies after "
        f"{span(nannies)} s. On Slurm hpcgpu has them after {short(batch)} s, the others with nannies after "
        f"{span(queued)} s.",
        [
            ("", "hpcgpu", "Dask's own", "dask-mpi"),
            (
                "CPU s per worker, one machine (`dask worker`)",
                *(short(cost("cpu_s_per_worker", w)) for w in ("hpcgpu", "dask worker nanny", "dask-mpi Nanny")),
            ),
            (
                "memory of all processes, MiB",
                *(short(cost("uss_mib", who)) for who in ("hpcgpu", "dask worker nanny", "dask-mpi Nanny")),
            ),
            (
                "CPU s per worker, Slurm (dask-jobqueue, 2 jobs)",
                *(short(slurm(w)) for w in ("hpcgpu", "dask-jobqueue, 2 jobs x 4, nanny", "dask-mpi, nanny")),
            ),
            (
                "s until a killed worker is replaced (nanny)",
                *(short(f.value("startup", "2 workers", "restart_s", who)) for who in ("hpcgpu", "nanny")),
                "-",
            ),
        ],
    )


def spilling(f: Figures) -> Question:
    """Compare the stores, disk tiers and rules for what is spilled."""
    loop = {MAKE: "make", READ: "read"}
    sizes = {size: size for size in ("8 MiB", "256 KiB", "16 KiB")}
    tiers = {"hpcgpu": "hpcgpu", "zict.File": "zict.File (SpillBuffer)", "dd": "dd"}
    moved = []
    for who, label in POLICIES.items():
        rows = f.select("spill_policy", "moved_to_lru", lambda row, who=who: row["who"] == who)
        points = tuple(float(row["value"]) for row in rows if row["case"] != "all")
        total = f.value("spill_policy", "all", "moved_to_lru", who)
        moved.append(Mark(label, "hpcgpu" if who.startswith("hpcgpu") else who, Figure(total, points=points)))
    took = {case: [f.value("spill", case, "wall_s", who) for who in STORES] for case in loop}
    late = [f.value("spill", READ, "lag_p99_ms", who) for who in STORES]
    small = f.value("disk", "16 KiB", "write", "hpcgpu") / f.value("disk", "16 KiB", "write", "zict.File")
    call = "10,000 keys of 4 KiB"
    return Question(
        "spilling",
        "What does spilling cost?",
        [
            Panel("bars", "Seconds: 40 arrays of 64 MiB, 0.5 GB may stay", f.marks("spill", "wall_s", loop, STORES)),
            Panel(
                "dots",
                "How late the event loop is, ms (99th percentile)",
                f.marks("spill", "lag_p99_ms", loop, STORES),
                log=True,
            ),
            Panel(
                "dots", "Write to disk, GB/s, by size of the values", f.marks("disk", "write", sizes, tiers), log=True
            ),
            Panel("dots", "Bytes moved; LRU is 1", tuple(moved), colours="peers"),
        ],
        2,
        f"40 arrays of 64 MiB, of which 0.5 GB may stay, are used again after {short(took[READ][0])} s from disk and "
        f"{short(took[READ][1])} s from host memory. SpillBuffer takes {short(took[READ][2])} s from disk, and the "
        f"event loop of the worker is {short(late[2])} ms late instead of {short(late[0])}. In recorded jobs hpcgpu "
        f"moves {short(moved[1].figure.value)} of the bytes that LRU moves; Belady's rule, which knows the future, "
        f"moves {short(moved[0].figure.value)}.",
        f"Four charts. Reading 40 arrays back takes {short(took[READ][0])} s from disk with hpcgpu and "
        f"{short(took[READ][2])} s with SpillBuffer; making them {short(took[MAKE][0])} and {short(took[MAKE][2])} s. "
        f"The event loop is {short(late[0])} and {short(late[2])} ms late. Values of 16 KiB are written to "
        f"disk {small:.0f} times as fast as by zict.File. hpcgpu moves {short(moved[1].figure.value)} of LRU's bytes.",
        [
            ("", "hpcgpu", "SpillBuffer", "dict"),
            *(
                (
                    f"`{what}`, CPU µs, nothing spilled, {call}",
                    *(short(f.value("spill", call, measure, who)) for who in ("hpcgpu", "SpillBuffer", "dict")),
                )
                for what, measure in (
                    ("data[key] = value", "set_us"),
                    ("data[key]", "get_us"),
                    ("del data[key]", "del_us"),
                )
            ),
            (
                "CPU s per GB, write 16 KiB values (zict.File)",
                *(short(f.value("disk", "16 KiB", "write_cpu", who)) for who in ("hpcgpu", "zict.File")),
                "-",
            ),
        ],
    )


def bytes_between_workers(f: Figures) -> Question:
    """Compare the ways of bytes within a node."""
    cases: dict[str, str] = {}
    for row in f.select("protocols", "gib_per_s", lambda r: r["case"].endswith(", host") and r["who"] in WAYS):
        cases[row["case"]] = row["case"].partition("arrays of ")[2].removesuffix(", host")
    largest = list(cases)[-1]
    speed = {who: f.get("protocols", largest, "gib_per_s", who) for who in WAYS}
    cpu = {who: f.get("protocols", largest, "cpu_s_per_gib", who) for who in WAYS}

    def say(by_who: dict[str, Figure | None], who: str) -> str:
        figure = by_who[who]
        return short(figure.value if figure else None)

    rest = f.select("protocols", "cores", lambda row: row["who"] in UCX_BESIDE)
    beside = {
        "gib_per_s": ("GiB/s, arrays of 64 MiB", "8 arrays of 64 MiB, host"),
        "cpu_ms_per_task": ("CPU ms per task that does nothing", "1000 tasks that do nothing"),
        "cores": ("cores in use at rest", rest[0]["case"]),
    }
    return Question(
        "bytes",
        "How fast do bytes move between workers of a node?",
        [
            Panel("lines", "GiB/s, by size of the arrays", f.marks("protocols", "gib_per_s", cases, WAYS), log=True),
            Panel(
                "lines", "CPU s of both workers per GiB", f.marks("protocols", "cpu_s_per_gib", cases, WAYS), log=True
            ),
        ],
        2,
        f"Arrays of 64 MiB move at {say(speed, 'hpcgpu, tls')} GiB/s over tls and at {say(speed, 'hpcgpu, tcp')} over "
        f"tcp, because the receiver copies them from the sender's memory. LocalCluster over tls reaches "
        f"{say(speed, 'LocalCluster, tls')} GiB/s, for {say(cpu, 'LocalCluster, tls')} CPU seconds per GiB "
        f"instead of {say(cpu, 'hpcgpu, tls')}. [How it works](explanation/node-copies.md).",
        f"Two line charts over sizes of 16 KiB to 64 MiB. At 64 MiB hpcgpu moves {say(speed, 'hpcgpu, tls')} GiB/s "
        f"over tls, {say(speed, 'hpcgpu, tls, node_copies=False')} without copies within the node, LocalCluster "
        f"{say(speed, 'LocalCluster, tls')}. CPU seconds per GiB fall from {say(cpu, 'LocalCluster, tls')} to "
        f"{say(cpu, 'hpcgpu, tls')}.",
        [
            ("beside UCX", *(row["who"] for row in rest)),
            *(
                (text, *(short(f.value("protocols", case, measure, row["who"])) for row in rest))
                for measure, (text, case) in beside.items()
            ),
        ],
    )


def main_job(f: Figures) -> Question:
    """Compare whole jobs."""
    panels = [
        Panel(
            "dots",
            f"Seconds, over {protocol}",
            f.marks("main_job", "wall_s", {f"{job}, {protocol}": job for job in (*JOBS, *FITS)}, CLUSTERS),
        )
        for protocol in ("tcp", "tls")
    ]
    peer = " / LocalCluster"

    def ratio(job: str, protocol: str, who: str) -> Figure | None:
        return f.get("main_job", f"{job}, {protocol}", "wall_s_ratio", who + peer)

    every = {(j, p, w): r for j in (*JOBS, *FITS) for p in ("tcp", "tls") for w in CLUSTERS if (r := ratio(j, p, w))}

    def always(is_so: Callable[[Figure], bool]) -> str:
        jobs: dict[str, list[str]] = {}
        for (job, protocol, who), r in every.items():
            if who == "hpcgpu" and is_so(r):
                jobs.setdefault(job, []).append(protocol)
        return listed([job if len(each) > 1 else f"{job} over {each[0]}" for job, each in sorted(jobs.items())])

    faster = always(lambda r: (r.most or r.value) < 1)
    slower = always(lambda r: (r.least or r.value) > 1)
    ours = [r.value for (_, _, w), r in every.items() if w == "hpcgpu"]
    with_monitors = [f"{job}, monitors on" for job in JOBS]

    def memory(job: str, who: str) -> str:
        return ranged(f.get("main_job", f"{job}, tls", "peak_pss_mib", who), 0)

    goals = f.select("main_job", "wall_s_ratio", lambda row: row["goal"].startswith("<= 0.7"))
    idle = [f.value("main_job", f"idle, {p}", "pss_mib_ratio", "hpcgpu" + peer) for p in ("tcp", "tls")]
    return Question(
        "main-job",
        "How long does a whole job take?",
        panels,
        2,
        f"hpcgpu on simulated GPUs takes {span(ours)} of the time of a LocalCluster with the same limits of memory. "
        f"Faster in every run: {faster}. Slower in every run: {slower}. A simulated GPU copies by the CPU, which a "
        f"real one does not. Workers without work take {span(idle)} of the memory.",
        f"Dots with lines from the least to the most of the runs, for {len(JOBS) + len(FITS)} jobs over tcp and tls. "
        f"hpcgpu on simulated GPUs takes {span(ours)} of LocalCluster's time. "
        f"Always faster: {faster}. Always slower: {slower}.",
        [
            (
                "time divided by LocalCluster's",
                *(f"{who}, {p}" for who in ("GPUs", "host arrays") for p in ("tcp", "tls")),
            ),
            *(
                (
                    job,
                    *(
                        ranged(every.get((job, p, w)))
                        for w in ("hpcgpu", "hpcgpu, host arrays")
                        for p in ("tcp", "tls")
                    ),
                )
                for job in (*JOBS, *FITS)
            ),
        ],
        more=[
            ("peak memory of all processes, MiB, tls", *CLUSTERS.values()),
            *(
                row
                for job in (*JOBS, *with_monitors)
                if set((row := (job, *(memory(job, w) for w in CLUSTERS)))[1:]) != {"-"}
            ),
        ],
        note="In the jobs with `all fits` nothing is spilled. Each job is computed twice on its cluster, and the "
        "second time is shown ([why](benchmarks-notes.md#the-main-job)). Where LocalCluster spills, 0.7 of its time "
        f"was the goal; {sum(row['goal'].endswith('met') for row in goals)} of {len(goals)} figures reach it.",
    )


def binding(f: Figures) -> Question:
    """Compare rules for cores and ports on recorded machines."""
    rows = f.select("topology", "workers_with_half_of_their_cores_local", lambda r: r["case"].startswith("all "))
    case, workers = rows[0]["case"], rows[0]["unit"].removeprefix("of ").removesuffix(" workers")
    rules = {rule: rule for rule in CORE_RULES}
    local = {row["who"]: row["value"] for row in rows}

    def alone(measure: str) -> tuple[Mark, ...]:
        return tuple(Mark(rule, rule, figure) for rule in rules if (figure := f.get("topology", case, measure, rule)))

    shared = {rule: f.value("topology", case, "cores_of_several_workers", rule) for rule in rules}

    def ports(measure: str, rule: str) -> list[Row]:
        return f.select("topology", measure, lambda row: row["who"] == rule)

    def total(measure: str, rule: str) -> str:
        return short(sum(float(row["value"]) for row in ports(measure, rule)))

    machines = len(ports("workers_on_a_dead_port", "hpcgpu"))
    served = sum(int(row["unit"].split()[1]) for row in ports("workers_on_a_dead_port", "hpcgpu"))
    return Question(
        "binding",
        "Are workers near their GPUs?",
        [
            Panel(
                "bars",
                f"Of {workers} workers,\nwith near cores",
                alone("workers_with_half_of_their_cores_local"),
                colours="peers",
            ),
            Panel("bars", "Share of cores\nof several workers", alone("cores_of_several_workers"), colours="peers"),
            Panel("bars", "Share of cores\nof no worker", alone("cores_of_no_worker"), colours="peers"),
        ],
        3,
        f"On {case.removeprefix('all ')} with a worker for each GPU, hpcgpu gives {local['hpcgpu']} of {workers} "
        f"workers cores near their GPU; the rule of `dask cuda worker` does so for {local['dask cuda worker']}. Where "
        f"all local cores are given to each worker, {shared['all local cores (rrun.bind)']:.0%} of the cores have "
        f"several workers; with hpcgpu {shared['hpcgpu']:.0%}. [Why it matters](explanation/binding.md).",
        f"Bars for eight rules. Workers with near cores, of {workers}: hpcgpu {local['hpcgpu']}, dask cuda worker "
        f"{local['dask cuda worker']}, bindpcie {local['bindpcie']}. Cores that several workers have: hpcgpu "
        f"{shared['hpcgpu']:.0%}, all local cores {shared['all local cores (rrun.bind)']:.0%}.",
        [
            (
                f"rule for network ports, {served} workers of {machines} machines",
                "on a nearest active port",
                "on a dead port",
                "workers on the fullest port less those on the emptiest",
            ),
            *(
                (
                    rule,
                    total("workers_on_nearest_active_ports", rule),
                    total("workers_on_a_dead_port", rule),
                    span([float(row["value"]) for row in ports("port_load_spread", rule)]),
                )
                for rule in PORT_RULES
            ),
        ],
        note="The rules are stated in `benchmarks/_rules.py`; they are not the programs themselves.",
    )


def load(f: Figures) -> Question:
    """Compare what workers cost the scheduler."""
    marks = [
        Mark(row["who"], row["who"], to_figure(row))
        for row in f.select("load", "cpu_ms_per_join_and_leave", lambda row: row["case"] == CROWD)
    ]
    cost = {mark.label: mark.figure.value for mark in marks}
    (peer,) = (value for who, value in cost.items() if not who.startswith("hpcgpu"))
    ours = sum(cost.values()) - peer
    many = "one request for 1000 jobs"
    requests = counted(round(f.value("batch", many, "rpcs_scale_1000", "hpcgpu")))
    page = f.select("dashboard", "scheduler, while open", lambda row: bool(row))[-1]
    return Question(
        "load",
        "What does a large cluster cost?",
        [Panel("bars", "CPU ms for each worker that joins and leaves, 1000 workers", tuple(marks), colours="peers")],
        1,
        f"A worker that joins and leaves costs {short(ours)} ms of CPU in scheduler and cluster object together; "
        f"distributed's cost {short(peer)} ms. To submit 1000 jobs takes {requests}.",
        f"Three bars. hpcgpu's scheduler takes {short(cost['hpcgpu, scheduler'])} ms of CPU and its cluster object "
        f"{short(cost['hpcgpu, cluster object'])} ms for each worker that joins and leaves; distributed's scheduler "
        f"and cluster object, one process, {short(peer)} ms.",
        [
            ("", "hpcgpu"),
            ("`cluster.scale(jobs=250)`, CPU ms", short(f.value("load", "scale(jobs=250)", "own_cpu_ms", "hpcgpu"))),
            (
                "1000 jobs: s beside sbatch's own",
                short(f.value("batch", many, "own_s_scale_1000", "hpcgpu")),
            ),
            (
                "s from squeue's answer that a job is dead to the next sbatch",
                short(f.value("batch", "a dead job", "s_from_squeue_to_sbatch", "hpcgpu")),
            ),
            (f"dashboard, {page['case']}, while open: {page['unit']}", short(float(page["value"]))),
            (
                "plan of a node with 16 GPUs, 16 ports, 512 PUs, ms",
                short(f.value("topology", "16 GPUs, 16 NICs, 512 PUs", "plan_ms", "hpcgpu")),
            ),
        ],
    )


def checkpoints(f: Figures) -> Question:
    """Compare ways to keep a result."""
    size = f.select("checkpoint", "write", lambda row: row["who"] == "dd")[0]["case"].partition(", ")[2]
    trip, job, write = f"round trip, {size}", f"job, {size}", f"write, {size}"
    ways = {"hpcgpu": "hpcgpu", "zarr": "to_zarr, no compression", "pickle": "one pickle (submitit's way)"}
    trip_rows = (("written and read, s", "wall_s"), ("written and read, CPU s", "cpu_s"))

    def of_job(measure: str, who: str) -> str:
        return ranged(f.get("checkpoint", job, measure, who))

    def trips(measure: str) -> tuple[Mark, ...]:
        figures = ((label, who, f.get("checkpoint", trip, measure, who)) for who, label in ways.items())
        return tuple(Mark(label, who, figure) for label, who, figure in figures if figure)

    value = partial(f.value, "checkpoint")
    wall, cpu = (value(trip, m, "hpcgpu") / value(trip, m, "zarr") for m in ("wall_s", "cpu_s"))
    rate = value(write, "write", "hpcgpu") / value(write, "write", "dd")
    longer = value(job, "wall_s", "with a checkpoint") / value(job, "wall_s", "without")
    beside = f.get("checkpoint", write, "late_ms", "idle, others write")
    return Question(
        "checkpoint",
        "What does a checkpoint cost?",
        [
            Panel("bars", f"Seconds: write {size} and read it", trips("wall_s"), colours="peers"),
            Panel("bars", "CPU seconds of all processes", trips("cpu_s"), colours="peers"),
        ],
        2,
        f"To write an array and read it takes {short(wall)} of the time and {short(cpu)} of the CPU of Zarr without "
        f"compression. Workers write at {short(rate)} of the rate of `dd conv=fsync`. A job whose result is written "
        f"takes {short(longer)} of its time without.",
        f"Horizontal bars. hpcgpu takes {short(wall)} of Zarr's time and {short(cpu)} of its CPU.",
        [
            ("", "", "goal"),
            ("GiB/s written, beside `dd conv=fsync`", short(rate), "0.8 or more"),
            ("time of the job, beside the job without", short(longer), "1.1 or less"),
            ("time of the round trip, beside Zarr", short(wall), "0.6 or less"),
            ("CPU of the round trip, beside Zarr", short(cpu), "0.6 or less"),
        ],
        more=[
            ("", *ways.values(), "without"),
            *((text, *(ranged(f.get("checkpoint", trip, m, who)) for who in ways), "-") for text, m in trip_rows),
            ("the job, s", of_job("wall_s", "with a checkpoint"), "-", "-", of_job("wall_s", "without")),
            ("the job, until it is on the disk, s", of_job("synced_s", "with a checkpoint"), "-", "-", "-"),
        ],
        note=f"While a worker writes, its event loop is late by {short(value(write, 'late_ms', 'hpcgpu'))} ms at "
        f"most; idle, by {short(value(write, 'late_ms', 'idle'))} ms"
        + (f", and idle while other processes write as much, by {short(beside.value)} ms" if beside else "")
        + ". Its memory grows by "
        f"{short(value(write, 'grown_mib', 'hpcgpu'))} MiB.",
    )


ANSWERS: tuple[Callable[[Figures], Question], ...] = (
    *(start, spilling, bytes_between_workers, main_job, binding, load),
    *([checkpoints] if (FIGURES / "checkpoint.csv").exists() else []),  # measured on the next ``make bench``
)
