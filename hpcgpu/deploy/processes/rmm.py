"""RMM in a worker, and the libraries that allocate by it: cuDF, CuPy, PyTorch."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import wrapt

from hpcgpu.errors import ConfigError, LaunchError, message_of
from hpcgpu.host import scratch
from hpcgpu.model.worker import Rapids
from hpcgpu.spill.devices import allocation_failure
from hpcgpu.spill.devices.libraries import spill_itself

logger = logging.getLogger("distributed.worker.memory")  # the store's
# They observe allocations, and stand above the resources that may fail: below, they would count each retry.
_OBSERVERS = ("LoggingResourceAdaptor", "TrackingResourceAdaptor")
_CLONE = "in a clone of hpcgpu"
_INSTALL = {"torch": "pip install torch", "cupy": f"pip install '.[cupy]' {_CLONE}"}


def set_up_rmm(rapids: Rapids) -> None:
    """Set up RMM and its users on the current CUDA device; cuDF reads its part from the environment.

    ConfigError: a library is not installed. LaunchError: too little memory is left, or the driver lacks a feature.
    """
    for module, option in rapids.needs:
        if importlib.util.find_spec(module) is None:
            how = _INSTALL.get(module, f"pip install '.[rapids]' {_CLONE}")
            raise ConfigError(
                f"{option} needs {module}, which is not installed for the workers' Python: {how}, or leave the option "
                "out"
            )
    option = next((option for module, option in rapids.needs if module == "rmm"), "")
    try:
        if option:
            _allocate_by(rapids)
        else:
            _evict_once_imported()
        for library in rapids.libraries:
            _SETTERS[library]()
    except (MemoryError, RuntimeError, ValueError, ImportError) as e:
        names = " on ".join(name for name, _ in reversed(rapids.resources)) or ", ".join(rapids.libraries)
        raise LaunchError(f"{option}: RMM does not set up {names} on this GPU: {message_of(e)}") from e


def _evict_once_imported() -> None:
    """Let failing allocations of RMM make the store evict, from RMM's import on, though no option asks for RMM."""

    def evict_by(rmm: Any) -> None:
        try:
            rmm.mr.set_current_device_resource(evicting(rmm.mr.get_current_device_resource()))
            _say_next_owner(rmm.mr)
        except RuntimeError as e:  # a worker that does not use it works without
            logger.warning("RMM is installed but fails on this GPU, and evicts nothing for its allocations: %s", e)

    # distributed imports RMM if it is installed (2026.8.0: worker.py); else cuDF or user code does
    wrapt.register_post_import_hook(evict_by, "rmm")


def _allocate_by(rapids: Rapids) -> None:
    """Stack the resources; rmm.reinitialize has no asynchronous one and no limit (26.10)."""
    import rmm

    below: tuple[Any, ...] = ()
    for name, arguments in (each for each in rapids.resources if each[0] not in _OBSERVERS):
        below = (getattr(rmm.mr, name)(*below, **dict(arguments)),)
    resource = evicting(below[0] if below else rmm.mr.get_current_device_resource())
    for name, arguments in (each for each in rapids.resources if each[0] in _OBSERVERS):
        options = dict(arguments)
        if "log_file_name" in options:
            scratch.make_private(Path(str(options["log_file_name"])).parent)
        resource = getattr(rmm.mr, name)(resource, **options)
    rmm.mr.set_current_device_resource(resource)
    _say_next_owner(rmm.mr, "the options of RMM no longer hold, and ")


def _say_next_owner(mr: Any, also: str = "") -> None:
    """Say once that other code sets RMM's resource, as cudf-polars' engine does: two owners, and the last one wins."""
    original = mr.set_current_device_resource

    def set_and_say(resource: Any) -> None:
        mr.set_current_device_resource = original
        original(resource)
        logger.warning(
            "RMM's resource in this worker was replaced by %s: %sits failing allocations evict nothing from the store. "
            "cudf-polars' DaskEngine does this: leave rmm_* and CuPy's arrays to other clusters",
            type(resource).__name__,
            also,
        )

    mr.set_current_device_resource = set_and_say


def evicting(resource: Any) -> Any:
    """Return a resource of RMM over another one. Its failing allocations make the store evict, and are retried."""
    import rmm

    def make_room(nbytes: int) -> bool:  # called again after each try that fails; this device is the first it sees
        return allocation_failure.evict(0, nbytes) or spill_itself(nbytes)

    # cuDF refuses to put its own callback beside ours (spill_manager.py, 26.10), which calls cuDF's
    wrapt.register_post_import_hook(lambda module: module.set_option("spill_on_demand", False), "cudf")
    return rmm.mr.FailureCallbackResourceAdaptor(resource, make_room)


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
