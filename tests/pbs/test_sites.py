"""A site of which only qstat and pbsnodes are known: its draft is a site file, and a cluster starts with it."""

import json
import re
import shlex

from pbs_lab import HOME, PbsLab

GIVEN = {"gpus": "sim:1x64MiB", "nodes": 2, "walltime": "00:10:00", "client_grace": 5}


def test_a_draft_is_enough_for_a_cluster(lab: PbsLab) -> None:
    """PBS counts two GPUs on each node of the lab, which has none: ``qsub`` takes a request for them as it is."""
    draft = lab.hpcgpu("site", "new", "--name", "lab", "--batch", "pbs")
    folder = HOME / ".config" / "hpcgpu" / "sites"
    lab.on("login01", f"mkdir -p {folder}; cat > {folder}/lab.yaml <<'E'\n{draft}E")
    try:
        assert "lab.yaml is a site file: lab, pbs" in lab.hpcgpu("site", "check", str(folder / "lab.yaml"))
        plan = json.loads(lab.hpcgpu("plan", "--site", "lab", "--gpus", "4", "--walltime", "1h", "--json"))
        assert plan["request"]["nodes"].startswith("2 (option --gpus; 2 on a node: site lab, ~/.config/hpcgpu/sites/")
        assert "#PBS -q workq" in plan["script"]
        script = "\n".join(["#!/bin/sh", *(line for line in plan["script"] if line.startswith("#PBS ")), "true"])
        job = lab.on("login01", f"mkdir -p work; cd work; qsub -h <<'E'\n{script}\nE").strip()
        lab.on("login01", f"qdel {shlex.quote(job)}")
        with lab.client() as client:
            client(f"cluster = PBSGPUCluster(site='lab', **{GIVEN}); client = Client(cluster)")
            assert client("client.submit(sum, [1, 2, 3]).result()") == 6
            assert client("len(client.nthreads())") == 2
            assert re.search(r"queue +workq +site lab, ~/\.config/hpcgpu/sites/lab\.yaml:", client("cluster.explain()"))
            client("client.close(); cluster.close()")
            assert "the site file of lab says" not in client.said
    finally:
        lab.on("login01", f"rm -f {folder}/lab.yaml; rm -rf work/STDIN.*")
