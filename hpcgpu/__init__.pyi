# What type checkers read in place of __init__.py, which loads these names on first touch.
from hpcgpu.checkpoint.checkpoint import Checkpoint as Checkpoint
from hpcgpu.deploy.cluster.classes import LocalGPUCluster as LocalGPUCluster
from hpcgpu.deploy.cluster.classes import PBSGPUCluster as PBSGPUCluster
from hpcgpu.deploy.cluster.classes import SLURMGPUCluster as SLURMGPUCluster
from hpcgpu.deploy.dashboard.worker_requests import bindings as bindings
from hpcgpu.deploy.dashboard.worker_requests import memory as memory
from hpcgpu.deploy.dashboard.worker_requests import trim_memory as trim_memory
from hpcgpu.deploy.processes.gpu_worker import GPUWorker as GPUWorker
from hpcgpu.deploy.start import GPURunner as GPURunner
from hpcgpu.errors import BindingError as BindingError
from hpcgpu.errors import CheckpointError as CheckpointError
from hpcgpu.errors import ConfigError as ConfigError
from hpcgpu.errors import HpcGpuError as HpcGpuError
from hpcgpu.errors import JobError as JobError
from hpcgpu.errors import LaunchError as LaunchError
from hpcgpu.errors import ParseError as ParseError
from hpcgpu.errors import SpillError as SpillError
from hpcgpu.errors import SubmitError as SubmitError
from hpcgpu.errors import TrustError as TrustError
from hpcgpu.spill.proxies import asproxy as asproxy
from hpcgpu.spill.proxies import unproxy as unproxy

__version__: str
