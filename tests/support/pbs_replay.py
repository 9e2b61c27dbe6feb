"""A PBS server as a folder: qsub, qstat, qdel answer in the words of recordings, and jobs are real processes here.

Nothing happens by time: jobs start, wait, are held or killed when the test says so (:class:`Pbs`), and end when their
processes do. What PBS prints is taken from ``data/batch/pbs``, from either build, with ids and fields put in.

``python pbs_replay.py FOLDER qsub|qstat|qselect|qdel|mom ...`` is what the programs run.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from leaks import signal_all
from recordings import SERVER, Record, block, listing, recorded

KILL_DELAY_S = 10.0
DOWN = {"pbsnodes": 1, "qsub": 162, "qdel": 162, "qstat": 255, "qselect": 162}  # 33-server-trouble; not qselect's


class Pbs:
    """The server; a test's own, and each program's."""

    def __init__(self, folder: Path, build: str = "") -> None:
        self.folder, self.jobs = folder, folder / "jobs"
        self.moms: list[subprocess.Popen[bytes]] = []  # those that this process has started
        if build:
            self.jobs.mkdir(parents=True)
            (folder / "spool").mkdir()
            self.write("build", build)
            self.auto(True)
        self.build = build or self.read("build")

    # files of one word or more: whoever reads sees the old or the new

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.write_text(text, errors="surrogateescape")
        new.replace(path)

    def read(self, name: str, default: str = "") -> str:
        path = self.folder / name
        return path.read_text(errors="surrogateescape") if path.exists() else default

    def set(self, job_id: str, **fields: object) -> None:
        for name, value in fields.items():
            self.write(f"jobs/{job_id}/{name}", str(value))

    def get(self, job_id: str, name: str) -> str:
        return self.read(f"jobs/{job_id}/{name}")

    # what a test does

    def install(self, into: Path) -> None:
        """Write the programs."""
        into.mkdir(exist_ok=True)
        for name in ("qsub", "qstat", "qselect", "qdel", "pbsnodes"):
            path = into / name
            words = (sys.executable, "-S", __file__, str(self.folder), name)
            path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            path.chmod(0o755)

    def auto(self, on: bool) -> None:
        """Have jobs start as soon as they are submitted, or only by :meth:`start`."""
        self.write("auto", "yes" if on else "")

    def history(self, on: bool) -> None:
        self.write("history", "yes" if on else "")

    def trouble(self, program: str) -> None:
        """Let the server be ``down``, for one program only, or up again."""
        self.write("trouble", program)

    def lose(self, way: str) -> None:
        """Let qsub hang from now on (``accepted``, ``unheard``), fail (``broken``), or answer again (``""``)."""
        self.write("lose", way)

    def refuse(self, refusal: Record) -> None:
        """Have each qsub from now on answer so."""
        self.write("refusal", json.dumps([refusal.returncode, refusal.stdout, refusal.stderr]))

    def say(self, job_id: str, state: str, comment: str = "", **fields: object) -> None:
        """Let a job that does not run be in another state."""
        self.set(job_id, comment=comment, **fields, state=state)

    def start(self, job_id: str) -> None:
        """Give a job its node: a process that sees to it until its end."""
        self.set(job_id, state="R", comment="Job run at Fri Nov 20 at 20:19 on (node0001:ncpus=2)")
        argv = [sys.executable, "-S", __file__, str(self.folder), "mom", job_id]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.moms.append(subprocess.Popen(argv, **quiet, start_new_session=True))

    def end(self, job_id: str, exit_status: int, comment: str = "", sig: int = signal.SIGTERM) -> None:
        """Have all processes of a running job get a signal: it was deleted, or is over its walltime (-29)."""
        self.set(job_id, ending=json.dumps([exit_status, comment]))
        signal_all(self.processes(job_id), sig)

    def requeue(self, job_id: str) -> None:
        """Kill a running job and have it wait again under its id, as after the loss of its node."""
        self.end(job_id, -11, "requeue", signal.SIGKILL)

    def lose_node(self, job_id: str) -> None:
        """Power its node off: all processes are gone, and nobody tells the server, which goes on to say R (run/50)."""
        self.set(job_id, lost="yes")
        signal_all(self.processes(job_id), signal.SIGKILL)

    def end_slowly(self, state: str) -> None:
        """Have jobs whose processes are gone stay in E, or in R while an epilogue runs (run/56); "": end them."""
        self.write("slow end", state)

    def ids(self) -> list[str]:
        """Return the jobs in the order of their submission, elements for their array."""
        names = {p.name for p in self.jobs.iterdir() if not p.name.startswith(".")}
        jobs = [i for i in names if "[]" not in i and ("[" not in i or re.sub(r"\[\d+\]", "[]", i) in names)]
        return sorted(jobs, key=lambda i: [int(n) for n in re.findall(r"\d+", i.partition(".")[0])])

    def calls(self, program: str) -> list[list[str]]:
        """Return the words of each call of a program."""
        lines = [json.loads(line) for line in self.read("calls").splitlines()]
        return [words[1:] for words in lines if words[0] == program]

    def processes(self, job_id: str) -> list[int]:
        """Return the processes of a job: those of its session, also where mpirun has made groups of their own."""
        session, pids = self.get(job_id, "session"), []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state, _, _, of = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                pids += [int(folder.name)] if of == session and state != "Z" else []
        return pids

    def over(self, job_id: str) -> bool:
        return self.get(job_id, "state") in ("F", "X")

    # what the programs do

    def qsub(self, script: str) -> int:
        if refusal := self.read("refusal"):
            return answer(*json.loads(refusal))
        lose = self.read("lose")
        while lose == self.read("lose") == "unheard":
            time.sleep(0.05)
        number = len([p for p in self.jobs.iterdir() if re.fullmatch(r"\d+(\[\])?\.login01", p.name)]) + 1021
        array = re.search(r"^#PBS -J (\d+)-(\d+)$", script, re.M)
        ids = [f"{number}[{i}].{SERVER}" for i in range(int(array[1]), int(array[2]) + 1)] if array else []
        whole = f"{number}[].{SERVER}" if array else f"{number}.{SERVER}"
        name = re.search(r"^#PBS -N (\S+)$", script, re.M)
        facts = {"script": script, "name": name[1] if name else "STDIN", "comment": "", "workdir": Path.cwd()}
        for job_id in (*ids, whole):  # they are there all at once: elements are with their array
            (self.jobs / f".{job_id}").mkdir()
            self.set(f".{job_id}", **facts, state="B" if array and job_id == whole else "Q")
            (self.jobs / f".{job_id}").rename(self.jobs / job_id)
        if self.read("auto"):
            for job_id in ids or [whole]:
                self.start(job_id)
        while lose == self.read("lose") == "accepted":
            time.sleep(0.05)
        if lose == "broken":  # PBSE_PROTOCOL & 255; these words are not recorded
            return answer(183, "", "qsub: Batch Protocol error\n")
        return answer(0, f"{whole}\n")

    def qselect(self, words: Sequence[str]) -> int:
        """Answer as in 04-qsub-too-large and 39-qsub-block; an array for its elements, as the manual says."""
        assert words[0] == "-N"
        named = [path.name for path in self.jobs.iterdir() if self.get(path.name, "name") == words[1]]
        ids = [i for i in named if not i.startswith(".") and not re.search(r"\[\d", i) and self.shown(i) != "F"]
        return answer(0, "".join(f"{i}\n" for i in sorted(ids)))

    def pbsnodes(self, words: Sequence[str]) -> int:
        """Answer as in run/66; a node is down when a job on it has lost its own."""
        assert tuple(words[:2]) == ("-F", "json")
        up, down = (recorded("run", "66-pbsnodes-down", i).stdout for i in (0, 1))
        lost = any(self.get(i, "lost") and not self.over(i) for i in self.ids())
        return answer(0, (down if lost else up).replace("node2", words[2]))

    def qdel(self, words: Sequence[str]) -> int:
        force = words[:2] == ("-W", "force")
        words = words[2:] if force else words
        if len(words) > 1:  # 17-qdel-many: a queued and an unknown one end the server, so ours are never two
            self.trouble("down")
            return answer(0)
        array = re.fullmatch(r"(\d+)\[(\d*)(?:-(\d+))?\](.*)", words[0])
        jobs = [words[0]]
        if array and array[2]:
            jobs = [f"{array[1]}[{i}]{array[4]}" for i in range(int(array[2]), int(array[3] or array[2]) + 1)]
        elif array:
            jobs = [i for i in self.ids() if i.startswith(f"{array[1]}[")]
        if not all((self.jobs / i).exists() for i in jobs) or all(map(self.over, jobs)):
            if self.read("history") and (self.jobs / jobs[0]).exists():
                return answer(35, "", f"qdel: Job has finished {words[0]}\n")
            return answer(153, "", f"qdel: Unknown Job Id {words[0]}\n")
        lost, late = ([i for i in jobs if self.get(i, name) and not self.over(i)] for name in ("lost", "late"))
        for job_id in {*jobs} - {*lost} - {*late}:
            if self.get(job_id, "state") in ("R", "E"):
                self.end(job_id, 271, "Job run at Fri Nov 20 at 20:19 on (node0001) and terminated by user1@login01")
            elif not self.over(job_id):
                self.set(job_id, exit="", state="X" if "[" in job_id else "F")
        if lost and not force:  # of several the first is named: run/63
            return answer(222, "", f"qdel: Server could not connect to MOM {lost[0]}\n")
        for job_id in lost:
            self.set(job_id, exit=265, state="X" if "[" in job_id else "F")
        if late:
            return answer(168, "", f"qdel: Request invalid for state of job {late[0]}\n")
        return answer(0)

    def qstat(self, words: Sequence[str]) -> int:
        flags, ids = [w for w in words if w.startswith("-")], [w for w in words if SERVER in w]
        code, errors, shown_jobs = 0, [], {}
        for job_id in ids:
            state = self.shown(job_id)
            if not state or (state == "F" and not self.read("history")):
                code = 153
                errors.append(f"qstat: Unknown Job Id {job_id}")
                if self.build == "head":
                    break  # head/12-qstat-unknown: what comes after is not listed
            elif state == "F" and "-x" not in flags:
                code = 35
                errors.append(f"qstat: {job_id} Job has finished, use -x or -H to obtain historical job information")
            else:
                shown_jobs[job_id] = self.block(job_id, state)
                if "[]" in job_id and "-t" in flags:
                    of = [i for i in self.ids() if i.startswith(job_id.partition("]")[0])]
                    shown_jobs |= {i: self.block(i, self.shown(i) or "F") for i in of}
        if "-x" in flags and not self.read("history"):
            code, errors = 0, [f"qstat: PBS is not configured to maintain job history {i}" for i in ids]
        shown = [*filter(None, [self.read("others")]), *shown_jobs.values()]
        return answer(code, listing(self.build, shown), "".join(f"{line}\n" for line in errors))

    def shown(self, job_id: str) -> str:
        """Return the state that qstat shows; an element is X until its array is over, and then gone with it."""
        state = self.get(job_id, "state")
        if "[" in job_id:
            of = [i for i in self.ids() if i.startswith(f"{job_id.partition('[')[0]}[")]
            if state and all(map(self.over, of)):
                return "F"
        return state

    def block(self, job_id: str, state: str) -> str:
        fields = {"comment": json.dumps(self.get(job_id, "comment")), "Exit_status": self.get(job_id, "exit")}
        text = block(self.build, job_id, state, {k: v for k, v in fields.items() if v not in ("", '""')})
        limit = re.search(r"^#PBS -l walltime=(\S+)$", self.get(job_id, "script"), re.M)
        return re.sub(r'("walltime"\s*:\s*)"[^"]*"', rf'\1"{limit[1]}"', text) if limit else text

    def mom(self, job_id: str) -> int:
        """Run a job as its node does; its output is there when it is over."""
        number, _, index = job_id.partition(".")[0].removesuffix("]").partition("[")
        spool, home = self.folder / "spool" / f"{job_id}.OU", os.environ["HOME"]
        nodefile = self.folder / "spool" / f"{job_id}.nodes"
        nodefile.write_text(f"{socket.gethostname()}\n")
        qstat = Path(shutil.which("qstat") or "/usr/bin/qstat")  # PBS puts its own programs into PATH
        env = {
            **{"HOME": home, "PATH": f"{qstat.parent}:/usr/local/bin:/usr/bin:/bin", "USER": "user1", "TMPDIR": "/tmp"},
            **{"NCPUS": "2", "OMP_NUM_THREADS": "2", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBID": job_id},
            **{"PBS_NODEFILE": str(nodefile), "PBS_NODENUM": "0", "PBS_O_WORKDIR": self.get(job_id, "workdir")},
            **({"PBS_ARRAY_INDEX": index, "PBS_ARRAY_ID": f"{number}[].{SERVER}"} if index else {}),
            **{k: os.environ[k] for k in ("PYTHONPATH",) if k in os.environ},
        }
        log = Path(self.get(job_id, "workdir"), f"{self.get(job_id, 'name')}.o{number}{index and f'.{index}'}")
        direct = "#PBS -k doe\n" in self.get(job_id, "script")
        with (log if direct else spool).open("ab") as out:
            argv = ["bash", "-c", self.get(job_id, "script")]
            quiet = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            job = subprocess.Popen(argv, **quiet, env=env, cwd=home, start_new_session=True)
        self.set(job_id, session=job.pid)
        since = 0.0
        while job.poll() is None or self.processes(job_id):
            if not since and (job.returncode is not None or self.get(job_id, "ending")):
                since = time.monotonic()
            if since and time.monotonic() > since + KILL_DELAY_S:
                self.end(job_id, *self.ending(job_id, job.returncode), sig=signal.SIGKILL)
            time.sleep(0.05)
        if self.get(job_id, "lost"):
            return 0
        exit_status, comment = self.ending(job_id, job.returncode)
        if comment == "requeue":
            (self.jobs / job_id / "ending").unlink()
            self.say(job_id, "Q", "Not Running: Not enough free nodes available", exit=exit_status)
            return 0
        text = comment or f"{self.get(job_id, 'comment')} and {'failed' if exit_status else 'finished'}"
        if slow := self.read("slow end"):
            self.set(job_id, exit=exit_status, state=slow, late="yes")
        else:
            self.set(job_id, exit=exit_status, comment=text, state="E")
        while self.read("slow end"):
            time.sleep(0.05)
        self.set(job_id, comment=text)
        if not direct:
            spool.replace(log)
        self.set(job_id, state="X" if index else "F")
        return 0

    def ending(self, job_id: str, code: int | None) -> tuple[int, str]:
        """Return exit status and comment: those of who killed it, else of the script."""
        if ending := self.get(job_id, "ending"):
            exit_status, comment = json.loads(ending)
            return exit_status, comment
        return (256 - code if code and code < 0 else code or 0), ""


def answer(code: int, out: str = "", err: str = "") -> int:
    sys.stdout.buffer.write(out.encode(errors="surrogateescape"))
    sys.stderr.write(err)
    return code


def main(folder: str, program: str, *words: str) -> int:
    pbs = Pbs(Path(folder))
    if program == "mom":
        return pbs.mom(words[0])
    with Path(folder, "calls").open("a") as calls:
        calls.write(json.dumps([program, *words]) + "\n")
    if pbs.read("trouble") in ("down", program):
        text = f"{program}: cannot connect to server login01 (errno=15010)"
        text = "Couldn't connect to cluster: login01" if program == "qdel" else text
        return answer(DOWN[program], "", f"Connection refused\n{text}\n")
    if program == "qsub":
        return pbs.qsub(sys.stdin.read())
    return int(getattr(pbs, program)(words))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
