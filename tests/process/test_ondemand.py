"""The app for Open OnDemand: rendered by ERB as Open OnDemand does it, and its job with a real Jupyter."""

import json
import os
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import psutil
import pytest
import ranks
import websocket
import yaml
from paths import ROOT, SUPPORT
from waiting import scaled

APP = ROOT / "packaging" / "ondemand"
FORM = {"hpcgpu": f"{ranks.BIN}/hpcgpu", "prologue": "", "site": "delta", "gpus": "8", "bc_num_hours": "2"}
FORM |= {"bc_account": "bbbb-delta-gpu", "bc_queue": ""}
JOB = SUPPORT / "ondemand.sh"
# OodCore::Job::Script#initialize (OSC/ood_core 2026-08), as far as a form can set it.
SCRIPT = {"wall_time", "accounting_id", "queue_name", "native"}
pytestmark = pytest.mark.skipif(shutil.which("ruby") is None, reason="there is no Ruby: apt-get install ruby")


def rendered(staged: Path, **changes: str) -> dict[str, Any]:
    argv = ["ruby", str(SUPPORT / "ondemand.rb"), str(APP), str(staged)]
    done = subprocess.run(argv, input=json.dumps(FORM | changes), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_fields_of_the_form_are_ones_that_open_ondemand_knows() -> None:
    form = yaml.safe_load((APP / "form.yml").read_text())
    assert set(form["form"]) == FORM.keys()
    assert form["attributes"].keys() <= FORM.keys()
    assert yaml.safe_load((APP / "manifest.yml").read_text())["role"] == "batch_connect"


@pytest.mark.parametrize("site", ["delta", "derecho"])
def test_job_of_a_form_has_the_options_of_the_plan(site: str, tmp_path: Path) -> None:
    script = rendered(tmp_path, site=site)["script"]
    native = script["native"]
    assert script.keys() <= SCRIPT
    assert script["wall_time"] == 7200
    assert all(isinstance(word, str) for word in native)
    expected = ["--nodes=2", "--gpus-per-node=4", "--time=02:00:00", "--account=bbbb-delta-gpu"]
    if site == "derecho":
        expected = ["place=scatter", "walltime=02:00:00", "main"]
        assert re.search(r"\bselect=2:.*:ngpus=4:", " ".join(native))
    assert set(expected) <= set(native)
    assert not [w for w in native if w.startswith(("--output", "--job-name", "--signal", "-N", "-j", "-o"))]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": "7"}, "hpcgpu: --gpus 7 (set by option --gpus): nodes of delta have 4; allowed: 1 to 4"),
        ({"bc_num_hours": "100"}, "walltime"),
        ({"site": "dleta"}, "no site 'dleta'"),
        ({"site": ""}, "or --site of a known machine"),
        ({"gpus": "8; touch evil"}, "--gpus"),
        ({"hpcgpu": "/nowhere/hpcgpu"}, "No such file or directory - /nowhere/hpcgpu"),
    ],
)
def test_form_filled_in_wrong_shows_the_plans_error(changes: dict[str, str], words: str, tmp_path: Path) -> None:
    found = rendered(tmp_path, **changes)
    assert found.keys() == {"error"}
    assert words in " ".join(found["error"].split())
    assert max(map(len, found["error"].splitlines())) <= 100  # the box breaks no lines: more would be out of sight
    assert not list(tmp_path.iterdir())


def test_card_of_a_failed_session_shows_hpcgpus_lines_as_text(tmp_path: Path) -> None:
    lines = ["Script starting...", *(f"hpcgpu: line {i}" for i in range(9)), "hpcgpu: <script>alert(1)</script>"]
    lines[-2] += " of many words" * 20
    assert "<pre>" not in rendered(tmp_path)["completed"]
    (tmp_path / "output.log").write_bytes("\n".join(lines).encode() + b"\nhpcgpu: \xff\n")
    card = rendered(tmp_path)["completed"]
    assert "hpcgpu: &lt;script&gt;" in card
    assert "line 2\n" not in card
    assert "line 3\n" in card
    assert max(map(len, card.splitlines())) <= 100


def test_session_is_a_jupyter_of_its_user_beside_the_cluster(tmp_path: Path) -> None:
    """The card's button logs in, without its password in any command; the job ends when the server is shut down."""
    program = tmp_path / "hpcgpu"
    program.write_text(f'#!/bin/sh\nexec bash {JOB} {ranks.BIN}/hpcgpu "$@"\n')
    program.chmod(0o755)
    card = rendered(tmp_path, hpcgpu=str(program))["view"]
    fields = dict(re.findall(r'name="(\w+)" value="(.*?)"', card))
    path = re.search(r'action="(.*?)"', card)[1]
    assert {*fields.values()} == {"known-to-ada"}
    (tmp_path / ".jupyter").mkdir()
    (tmp_path / ".jupyter/jupyter_config.py").write_text("c.ServerApp.allow_root = True\n")
    env = {**os.environ, "HOME": str(tmp_path), "PATH": f"{ranks.BIN}:{os.environ['PATH']}", "HPCGPU_GPUS": "sim:1"}
    with (tmp_path / "output.log").open("w") as log:
        job = subprocess.Popen(["bash", JOB], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
    with job:
        port, password = job.stdout.readline().split() or pytest.fail((tmp_path / "output.log").read_text())
        base = f"http://127.0.0.1:{port}/node/localhost/{port}"
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar := CookieJar()))
        form = urllib.parse.urlencode(dict.fromkeys(fields, password)).encode()
        target = f"http://127.0.0.1:{port}{path.replace('n7', 'localhost').replace('8888', port)}"
        with opener.open(target, form, timeout=scaled(60)) as page:
            assert (page.status, page.url) == (200, f"{base}/lab")
            assert "JupyterLab" in page.read().decode()
        # the portal's proxy is another origin than Jupyter's host; the pages of other sites get no cookie for it
        logins = [c for c in jar if c.name.startswith("username-")]
        assert [c.get_nonstandard_attr("SameSite") for c in logins] == ["Lax"]
        events = f"{base}/api/events/subscribe".replace("http", "ws", 1)
        login = {"cookie": f"{logins[0].name}={logins[0].value}", "origin": "https://portal"}
        websocket.create_connection(events, timeout=scaled(60), **login).close()
        assert not [p for p in psutil.process_iter(["cmdline"]) if password in " ".join(p.info["cmdline"] or ())]
        request = urllib.request.Request(f"{base}/api/shutdown", b"", {"Authorization": f"token {password}"})
        opener.open(request, timeout=scaled(60)).close()
        assert job.wait(scaled(60)) == 0, (tmp_path / "output.log").read_text()
    assert "1 worker on 1 node ready" in (tmp_path / "output.log").read_text()
