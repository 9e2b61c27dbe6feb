"""Clusters of several nodes that work, lose some of them at once, and go on; ``benchmarks/gang.py`` has 32 nodes."""

import os
from pathlib import Path

import pytest
from many_nodes import Trial
from pbs_replay import Pbs

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root sees and ends all processes of a namespace")


@pytest.fixture
def trial(pbs: Pbs, tmp_path: Path) -> Trial:
    return Trial(pbs, tmp_path, nodes=4, each=2, lost=1, tasks=1_000)


def test_a_gang_goes_on_without_a_node_and_names_it(trial: Trial) -> None:
    trial.gang()


@pytest.mark.usefixtures("impatient")
def test_elastic_jobs_are_there_again_after_a_loss(trial: Trial) -> None:
    trial.elastic()
