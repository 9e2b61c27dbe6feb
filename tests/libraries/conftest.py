"""What people run on top, in an environment of its own: ``make libraries``."""

import importlib.util

import pytest

PACKAGES = ("jax", "optuna", "sklearn", "torch", "xarray", "xgboost", "zarr")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    for item in items if missing else ():
        if item.get_closest_marker("libraries"):
            item.add_marker(pytest.mark.skip(reason=f"not installed here: {', '.join(missing)}: make libraries"))
