"""Batch systems: one module per system, each a pure value. Commands go out, results come in.

To add one: a frozen class, derived from :class:`BatchSystem`, in its own module, and recordings of its programs'
output under ``tests/data/batch``.
"""

from hpcgpu.batch.batch_system import BatchSystem as BatchSystem
from hpcgpu.batch.inventory import questions as questions
from hpcgpu.batch.inventory import read as read
from hpcgpu.batch.pbs import Pbs as Pbs
from hpcgpu.batch.slurm import Slurm as Slurm
from hpcgpu.batch.systems import SYSTEMS as SYSTEMS
from hpcgpu.batch.systems import get as get
