"""PBSGPUCluster against a replayed OpenPBS: what is submitted, and what is refused; the job itself is real.

The life of its job is in test_pbs_life, jobs that come and go in test_pbs_elastic.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from distributed import Client
from pages import blocks
from pbs_replay import Pbs
from recordings import recorded
from waiting import Said

from hpcgpu import PBSGPUCluster
from hpcgpu.errors import ConfigError, SubmitError

OPTIONS = {"gpus": "sim:2", "nodes": 1, "queue": "gpu", "account": "a-b", "walltime": "00:10:00"}


def test_a_cluster_from_start_to_end(pbs: Pbs) -> None:
    with PBSGPUCluster(**OPTIONS) as cluster, Client(cluster) as client:
        assert cluster.job_id == "1021.login01"
        assert client.submit(sum, [1, 2]).result() == 3
        assert len(client.scheduler_info()["workers"]) == 2
        script = cluster.job_script()
    assert pbs.get("1021.login01", "script") == script
    assert "#PBS -q gpu\n" in script
    assert "#PBS -l select=1:ncpus=2:mpiprocs=2\n" in script
    command = next(line for line in script.splitlines() if "--document" in line)
    words = shlex.split(command.partition("exec ")[2].rpartition(" >&")[0])
    assert json.loads(words[-1])["settings"]["account"] == "a-b"
    assert pbs.processes("1021.login01") == []


def test_log_folder_is_made_if_possible(pbs: Pbs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "logs"
    monkeypatch.setenv("HOME", str(tmp_path))
    with PBSGPUCluster(**OPTIONS, log_directory="~/new/logs") as cluster:
        assert folder.is_dir()
        assert f"#PBS -o {folder}/\n" in cluster.job_script()
    with PBSGPUCluster(**OPTIONS, log_directory="/proc/on-the-nodes-only") as cluster:
        assert "#PBS -o /proc/on-the-nodes-only/\n" in cluster.job_script()
    with PBSGPUCluster(**OPTIONS, log_directory=f"{tmp_path}/%u/logs"):
        assert not (tmp_path / "%u").exists()  # the batch system's pattern, not a name


@pytest.mark.parametrize("build", ["release", "head"])
def test_a_refusal_reaches_the_caller_in_qsubs_words(pbs: Pbs, build: str) -> None:
    pbs.refuse(recorded(build, "02-qsub-bad-queue", 0))
    with pytest.raises(SubmitError, match="qsub refused the job: qsub: Unknown queue") as caught:
        PBSGPUCluster(**OPTIONS)
    assert f" -q {OPTIONS['queue']} -A " in str(caught.value).splitlines()[-1]


def test_the_example_of_the_page_for_users_of_dask_jobqueue_runs(pbs: Pbs, said: Said) -> None:
    [example] = blocks("dask-jobqueue", "python")
    exec(example, {})
    assert pbs.get("1021.login01", "exit") == "0"
    assert "#PBS -q gpu\n" in said.text
    assert said.text.splitlines().count("6") == 1


def test_the_launcher_of_a_site_starts_the_ranks(pbs: Pbs, tmp_path: Path) -> None:
    start = tmp_path / "start"
    start.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/started\nshift\nexec "$@"\n')
    start.chmod(0o755)
    site = tmp_path / "here.yaml"
    site.write_text(f'version: 2\nname: here\nbatch: pbs\nlauncher:\n  command: [{start}, "of the site"]\n')
    with PBSGPUCluster(**OPTIONS, site=str(site), ranks="node") as cluster, Client(cluster) as client:
        client.wait_for_workers(2)
        assert client.submit(sum, [1, 2]).result() == 3
        assert "site here, " in cluster.job_script()
    assert (tmp_path / "started").read_text() == "of the site\n"


def test_nothing_is_submitted_for_bad_input(pbs: Pbs) -> None:
    with pytest.raises(ConfigError, match="the number of GPUs of each node"):
        PBSGPUCluster(nodes=2)
    with pytest.raises(ConfigError, match="nodes"):
        PBSGPUCluster(nodes=0, gpus="sim:2")
    assert pbs.calls("qsub") == []
