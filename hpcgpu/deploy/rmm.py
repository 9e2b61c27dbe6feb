"""RMM and what allocates through it, set up in the worker's process: after binding, before user code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hpcgpu.errors import ConfigError, LaunchError
from hpcgpu.model.worker import Rapids

_EXTRA = "pip install 'hpcgpu[rapids]'"


def set_up(rapids: Rapids) -> None:
    """Do what the worker was planned to have, on the current CUDA device.

    Parameters
    ----------
    rapids : Rapids
        The plan. cuDF reads its part from the environment when it is imported, which is left to user code.

    Raises
    ------
    ConfigError
        A library that an option needs is not installed here.
    LaunchError
        RMM refuses: the GPU has not as much memory left, or the driver lacks what is asked for.

    """
    for module, asked in rapids.needs:
        _check_installed(module, asked)
    asked = next((asked for module, asked in rapids.needs if module == "rmm"), "")
    try:
        if rapids.resources:
            _allocate_by(rapids)
        for library in rapids.libraries:
            _SETTERS[library]()
    except (MemoryError, RuntimeError, ValueError, ImportError) as e:
        what = " on ".join(name for name, _ in reversed(rapids.resources)) or ", ".join(rapids.libraries)
        raise LaunchError(f"{asked}: RMM does not set up {what} on this GPU: {e}") from e


def _check_installed(module: str, asked: str) -> None:
    if importlib.util.find_spec(module) is not None:
        return
    how = {"torch": "pip install torch", "cupy": "pip install 'hpcgpu[cupy]'"}.get(module, _EXTRA)
    raise ConfigError(
        f"{asked} needs {module}, which is not installed for the workers' Python: {how}, or leave the option out"
    )


def _allocate_by(rapids: Rapids) -> None:
    """Stack the resources; not by rmm.reinitialize, which has no asynchronous one and no limit (26.10)."""
    import rmm

    below: tuple[Any, ...] = ()
    for name, arguments in rapids.resources:
        given = dict(arguments)
        if "log_file_name" in given:
            Path(str(given["log_file_name"])).parent.mkdir(parents=True, exist_ok=True)
        below = (getattr(rmm.mr, name)(*below, **given),)
    rmm.mr.set_current_device_resource(below[0])


def _set_cupy() -> None:
    import cupy
    from rmm.allocators.cupy import rmm_cupy_allocator

    cupy.cuda.set_allocator(rmm_cupy_allocator)


def _set_torch() -> None:
    import torch  # type: ignore[import-not-found] # of no extra of ours
    from rmm.allocators.torch import rmm_torch_allocator

    if rmm_torch_allocator is None:
        raise RuntimeError("this PyTorch is built without CUDA, or sees no GPU")
    torch.cuda.memory.change_current_allocator(rmm_torch_allocator)


_SETTERS = {"cupy": _set_cupy, "torch": _set_torch}
