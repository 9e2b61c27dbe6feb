"""cuDF's own options and spill manager without its 500 MB of compiled code: its Python files, where its wheel is."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import types
from pathlib import Path
from typing import Any

import pytest


def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a package ``cudf`` with the real modules ``options`` and ``core.buffer``, until the test ends."""
    try:
        folder = Path(str(importlib.metadata.distribution("cudf-cu13").locate_file("cudf")))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("no cuDF here")
    for name in [name for name in sys.modules if name.partition(".")[0] == "cudf"]:
        monkeypatch.delitem(sys.modules, name)

    def stand_in(name: str, **names: Any) -> Any:
        module = types.ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    domain = object()  # NVTX is not looked at, nor what is compiled of libcudf
    annotate = types.SimpleNamespace(domain=domain)
    stand_in("nvtx", annotate=lambda *_, **__: annotate, nvtx=types.SimpleNamespace(dummy_domain=domain))
    stand_in("pylibcudf", column=types.SimpleNamespace(is_c_contiguous=lambda *_: True))
    made = stand_in("cudf", __path__=[str(folder)])
    options = importlib.import_module("cudf.options")
    made.get_option, made.set_option = options.get_option, options.set_option
    importlib.import_module("cudf.core.buffer")
    return made
