"""Random numbers of a simulated GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcgpu.sim.gpu import current_gpu


class RandomState:
    """Random numbers made on the device, for ``da.random.RandomState(seed, RandomState=hpcgpu.sim.RandomState)``."""

    def __init__(self, seed: Any = None) -> None:  # as numpy's
        self._numpy = np.random.RandomState(seed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        draw = getattr(self._numpy, name)

        def on_device(*args: Any, **kwargs: Any) -> Any:
            drawn = draw(*args, **kwargs)
            return current_gpu().adopt(drawn) if isinstance(drawn, np.ndarray) else drawn

        return on_device
