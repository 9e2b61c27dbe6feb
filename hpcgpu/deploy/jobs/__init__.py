"""Jobs: one Run with its folder, owner and jobs; submitting, polling, replacing and ending them; their logs."""

from hpcgpu.deploy.jobs.run import Pool as Pool
from hpcgpu.deploy.jobs.run import Run as Run
from hpcgpu.deploy.jobs.run import home as home
from hpcgpu.deploy.jobs.run import sweep as sweep
