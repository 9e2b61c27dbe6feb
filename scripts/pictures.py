"""Draw docs/pictures from recorded machines: every core and every GPU is granted. Run it from anywhere."""

from __future__ import annotations

from pathlib import Path

from hpcgpu.model import CpuSet
from hpcgpu.pictures.layout import render_svg
from hpcgpu.plan.binding.bindings import plan_bindings
from hpcgpu.topology import hwloc_xml

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
MACHINES = ("turin-4gpu-nvml", "coral-lassen", "epyc-corona", "nvidiaDGX2")


def picture(machine: str) -> str:
    """Return the SVG of one recorded machine with a worker for each of its GPUs."""
    topology = hwloc_xml.read_file((ROOT / "tests" / "data" / "topology" / f"{machine}.xml").read_text())
    every = CpuSet(pu for core in topology.cores for pu in core)
    bindings = plan_bindings(topology, topology.gpus, every)
    return render_svg(topology, bindings)


def main() -> None:
    """Write them all."""
    PICTURES.mkdir(exist_ok=True)
    for machine in MACHINES:
        (PICTURES / f"{machine}.svg").write_text(picture(machine))


if __name__ == "__main__":
    main()
