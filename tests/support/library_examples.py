"""The examples of ``examples/libraries``, computed on any cluster: their results as JSON, to be compared.

``python library_examples.py EXAMPLES FOLDER RESULTS`` is a script of ``hpcgpu run``.
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

from distributed import Client

# Those that have no other needs than the packages of `make libraries`, and what their compute takes beside the client.
NAMES = ("optuna_study", "pandas_shuffle", "sklearn_joblib", "torch_ddp", "xarray_zarr", "xgboost_trees")


def results(client: Client, examples: Path, folder: Path) -> dict[str, Any]:
    """Compute each example; ``folder`` is one that the workers see."""
    out: dict[str, Any] = {"scheduler": client.scheduler.address, "workers": sorted(client.nthreads())}
    for name in NAMES:
        # pickled by value, as what a user's script defines
        compute = runpy.run_path(str(examples / f"{name}.py"), run_name="__main__ of a test")["compute"]
        more = (folder / "store.zarr",) if name == "xarray_zarr" else ()
        out[name] = plain(compute(client, *more))
    return out


def plain(result: Any) -> Any:
    """Return a result as lists and numbers."""
    if hasattr(result, "to_dict") and hasattr(result, "columns"):
        return {column: result[column].tolist() for column in result.columns}
    if isinstance(result, dict):
        return {str(key): value for key, value in result.items()}
    return result if isinstance(result, list) else getattr(result, "values", result).tolist()


if __name__ == "__main__":
    examples, folder, path = map(Path, sys.argv[1:])
    with Client() as client:
        path.write_text(json.dumps(results(client, examples, folder)))
