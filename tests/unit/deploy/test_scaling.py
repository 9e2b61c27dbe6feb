"""scale and adapt in the words of Dask's and of dask-jobqueue's users."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from hpcgpu.deploy.cluster.classes import bounds, check_scale, workers_with
from hpcgpu.errors import ConfigError
from hpcgpu.model import Settings
from hpcgpu.model.settings import Limit

GIB = 2**30
# eight cores and 16 GiB for each of four GPUs
NODE = Settings(gpus_per_node=4, cores_per_gpu=8, memory_bytes=64 * GIB)


@pytest.mark.parametrize(
    ("settings", "cores", "memory", "least", "most"),
    [
        (NODE, 32, None, 4, 4),
        (NODE, 33, None, 5, 4),
        (NODE, None, "32GiB", 2, 2),
        (NODE, None, 40 * GIB, 3, 2),
        (NODE, 8, "64GiB", 4, 1),
        (NODE, 0, None, 0, 0),
        (NODE, np.int64(16), None, 2, 2),
        (Settings(gpus_per_node=4, cores_per_gpu=8, workers_per_gpu=2), 32, None, 8, 8),
        (Settings(nthreads=4, sources=MappingProxyType({"nthreads": "keyword"})), 16, None, 4, 4),
        (Settings(memory_limit=Limit(8 * GIB)), None, "32GiB", 4, 4),
    ],
)
def test_cores_and_memory_become_workers(
    settings: Settings, cores: float | None, memory: Any, least: int, most: int
) -> None:
    assert workers_with(settings, cores, memory) == least
    assert workers_with(settings, cores, memory, most=True) == most


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cores": 8}, r"the number of cores of a worker is unknown; .* cores_per_gpu=.*scale\(jobs=n\)"),
        ({"memory": "8GB"}, r"the memory of a worker is unknown; .* memory= .*memory_limit="),
        ({"cores": "many"}, "cores='many' is no number of cores"),
        ({"cores": math.inf}, "cores=inf is no number of cores"),
        ({"memory": "much"}, "'much' is not a size"),
    ],
)
def test_workers_with_refuses_what_is_unknown(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        workers_with(Settings(gpus_per_node=4), given.get("cores"), given.get("memory"))


def test_check_scale_takes_exactly_one_size() -> None:
    for n, jobs, cores, memory in ((0, None, None, None), (None, 2, None, None), (None, None, 8, None)):
        check_scale(n, jobs, cores, memory)
    check_scale(None, None, None, "1GB")
    check_scale(None, None, 8, "1GB")
    for wrong in (
        (),
        (2, 1),
        (2, None, 8, "1GB"),
        (2, None, 8),
        (-1,),
        (2.5,),
        ("2",),
        (True,),
        (None, -1),
        (None, 1.5),
    ):
        with pytest.raises(ConfigError, match=r"^scale\(.*\); give one of them, 0 or more: n workers, jobs, or cores"):
            check_scale(*(*wrong, None, None, None, None)[:4])


def test_bounds_of_adapt() -> None:
    def of(**options: Any) -> dict[str, Any]:
        return bounds(NODE, 4, 2, options)

    assert of(minimum=1, maximum=9, interval="1s") == {"minimum": 1, "maximum": 9, "interval": "1s"}
    assert of(minimum_jobs=1, maximum_jobs=3) == {"minimum": 6, "maximum": 10}
    assert of(minimum_cores=9, maximum_cores=79) == {"minimum": 2, "maximum": 9}
    assert of(maximum_memory="64GiB", minimum=None) == {"maximum": 4}
    for wrong in ({"minimum": 5, "maximum": 2}, {"minimum": -1}, {"maximum": "9"}):
        with pytest.raises(ConfigError, match=r"adapt: minimum .*, maximum .*; give 0 or more"):
            of(**wrong)
    with pytest.raises(ConfigError, match="adapt: maximum is given in two ways"):
        of(maximum=3, maximum_jobs=3)
    with pytest.raises(ConfigError, match=r"minimum_jobs='2' is no number of jobs"):
        of(minimum_jobs="2")
