"""Every command of the README is tried somewhere."""

from __future__ import annotations

import re

import commands
from click.testing import CliRunner
from pages import LINES, line
from paths import ROOT

from hpcgpu.cli.commands import hpcgpu

# No site is taken for this machine's, and tables are not folded.
WIDE = {"HPCGPU_SITE": "", "COLUMNS": "200"}


def test_every_door_is_tried() -> None:
    tried = ("make ", ". .venv/bin/activate", "sbatch ", "hpcgpu launch ", "mpirun ", "hpcgpu run ", "pip install ")
    tried += ("hpcgpu site list", "hpcgpu plan ", "hpcgpu doctor", "python first.py")
    assert [text for text in LINES if text and not text.startswith(tried)] == []


def test_it_is_short_and_its_first_page_is_for_those_who_know_a_name() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 120
    first = "\n".join(text.splitlines()[:60])
    assert all(word in first for word in ("hpcgpu site list", 'site="delta", gpus=8', "hpcgpu plan", "hpcgpu doctor"))
    for shown in filter(lambda text: text.startswith("hpcgpu"), LINES):
        commands.check(shown)


def test_the_words_of_its_first_cluster_are_in_the_order_in_which_they_are_typed() -> None:
    text = (ROOT / "README.md").read_text()
    typed = ("make demo", "make slurm-up", "make slurm-shell", "`cat > first.py`", "SLURMGPUCluster(nodes=2")
    places = [text.index(words) for words in (*typed, "python first.py")]
    assert places == sorted(places)


def test_a_known_machine_is_planned_for_as_shown() -> None:
    def run(start: str) -> str:
        done = CliRunner(env=WIDE).invoke(hpcgpu, line(start)[1:], catch_exceptions=False)
        assert done.exit_code == 0
        return str(done.output)

    assert len(run("hpcgpu site list").splitlines()) == len(list((ROOT / "site_configs").glob("*.yaml")))
    plan = run("hpcgpu plan ")
    assert "  9 ranks and 8 workers; rank 0 has the scheduler" in plan.splitlines()
    assert re.search(r"^  worker-3 .* NUMA 0, ", plan, re.M), "the page says that this site's nodes are documented"


def test_the_site_that_is_named_for_its_cost_has_one() -> None:
    assert "(Vista does)" in (ROOT / "README.md").read_text()
    argv = ["plan", "--site", "vista", "--gpus", "8", "--account", "m0000", "--walltime", "01:00:00", "--no-ask"]
    done = CliRunner(env=WIDE).invoke(hpcgpu, argv, catch_exceptions=False)
    assert re.search(r"^  cost: about 8 SU ", done.output, re.M)
