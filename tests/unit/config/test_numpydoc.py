"""What help() and a notebook's ``?`` show of the classes: every option, from the one place where it is declared."""

from __future__ import annotations

import inspect

import pytest

import hpcgpu
from hpcgpu.config.layers import ENTRY_POINTS, TYPES, documented, parameters, unused
from hpcgpu.model.settings import options, user_name


@pytest.mark.parametrize("name", ["SLURMGPUCluster", "PBSGPUCluster", "LocalGPUCluster", "GPURunner"])
def test_signature_shows_every_option_with_its_default(name: str) -> None:
    cls = getattr(hpcgpu, name)
    refused = unused(name)
    taken = [f for f in options() if user_name(f) not in refused]
    shown, doc = inspect.signature(cls).parameters, inspect.getdoc(cls)
    assert [n for n in shown if n in map(user_name, options())] == [user_name(f) for f in taken]
    assert (shown["device_memory_limit"].default, shown["env"].default) == (0.8, {})
    assert ("nodes" in refused) == (name in ENTRY_POINTS)
    for f in taken:
        assert f"\n{user_name(f)} : " in doc
        assert f.metadata["text"] in " ".join(doc.split())
    assert [n for n in refused if f"\n{n} : " in doc] == []
    assert "\nprotocol : {" in doc
    assert "given" not in doc.partition("Raises")[0].partition("Parameters")[2].split()
    sections = ["Parameters\n---", "Raises\n---", "Examples\n---"]
    places = [doc.find(section) for section in sections if section in doc]
    assert len(places) >= 2
    assert places == sorted(places)


def test_the_sections_of_the_base_stand_before_ones_own() -> None:
    base = "Base.\n\nParameters\n----------\n**keywords\n    The options.\nloop : IOLoop\n    Of Dask.\n"
    own = "Mine.\n\nMore.\n\nExamples\n--------\n>>> 1\n1\n"
    doc = documented(own, base)
    assert doc.startswith("Mine.\n\nMore.\n\nParameters\n----------\nnodes : int, default 1\n")
    assert doc.endswith("\nloop : IOLoop\n    Of Dask.\n\nExamples\n--------\n>>> 1\n1\n")
    assert documented("") == "\n"  # python -OO
    doc = inspect.getdoc(hpcgpu.SLURMGPUCluster)
    assert "\nranks : {'gpu', 'node'}, default 'gpu'\n    one MPI rank per GPU, or one per node\n" in doc
    assert "\nqueue : str, optional\n    queue or partition; also partition\n" in doc


def test_each_option_has_a_type_and_each_error_its_name() -> None:
    assert {f.metadata["kind"] for f in options()} == {*TYPES, "choice"}
    assert len(parameters()) == len(options())
    for name in ("HpcGpuError", "ConfigError", "SubmitError", "JobError", "LaunchError", "SpillError"):
        assert issubclass(getattr(hpcgpu, name), hpcgpu.HpcGpuError)
        assert name in dir(hpcgpu)
