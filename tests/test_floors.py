"""The house stands: who may import whom, who may touch the machine, and how large a thing may grow."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "hpcgpu"
FILES = sorted(ROOT.rglob("*.py"))

LOW = {"errors", "units"}
FLOOR2 = {"topology", "batch", "launch", "config"}
BELOW_AGENT = LOW | FLOOR2 | {"model", "plan", "host", "spill", "sim", "deploy"}
# Which rooms of hpcgpu a room may import, beside itself (design 4). A room that is not here fails.
ROOMS: dict[str, set[str]] = {
    "__init__": set(),
    "__main__": {"cli"},
    "worker": {"cli"},  # python -m hpcgpu.worker
    "errors": set(),
    "units": {"errors"},
    "model": LOW,
    **dict.fromkeys(FLOOR2, LOW | {"model"}),
    "plan": LOW | {"model", "launch"},
    "sim": LOW | {"model"},
    "spill": LOW | {"model"},
    "host": LOW | {"model", "topology"},
    "deploy": LOW | FLOOR2 | {"model", "plan", "host", "spill", "sim"},
    "agent": BELOW_AGENT,
    "cli": BELOW_AGENT | {"agent"},
}
# The same for the rooms inside deploy; a module of deploy itself may import all of them.
DEPLOY: dict[str, set[str]] = {
    "network": set(),
    "processes": {"network", "compat", "settings"},
    "jobs": {"network", "settings"},
    "clusters": {"network", "processes", "jobs", "settings", "start", "report", "memory"},
}
PURE = {"errors", "units", "model", "plan"} | FLOOR2
MACHINE = {
    *("os", "pathlib", "subprocess", "socket", "asyncio", "threading", "time", "ctypes", "signal", "multiprocessing"),
    *("tempfile", "pkgutil", "shutil", "io", "glob", "fcntl", "select", "selectors"),
}
OUTSIDE: dict[str, set[str]] = {  # what is not the standard library, and pure rooms' few exceptions
    "config": {"msgspec", "yaml"},
    "batch": set(),
    "sim": {"numpy"},
    "spill": {"numpy", "wrapt", "cupy", "cuda"},
    "host": {"psutil", "pynvml", "cryptography", "msgspec"},
    "deploy": {"distributed", "dask", "tornado", "numpy", "psutil", "rich", "cryptography", "bokeh", "dask_cuda"}
    | {"rmm", "cupy", "torch", "wrapt"},  # deploy/processes/rmm.py
    "agent": {"mpi4py", "distributed", "dask", "numpy", "psutil"},
    "cli": {"click", "rich"},
}
DASK_GLUE = {("sim", "dask"), ("spill", "dask"), ("spill", "proxy_dask")}  # dask and distributed.protocol
PACKAGES = {("hpcgpu",), ("hpcgpu", "deploy")}
AGENT_TOP = {"errors", "units", "model", "launch", "host", "agent"}


def home(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree: ast.AST, path: Path) -> set[tuple[str, ...]]:
    """Every imported module as a tuple; ``from hpcgpu import x`` counts as ``hpcgpu.x``, so from hpcgpu.deploy."""
    package = path.relative_to(ROOT.parent).with_suffix("").parts
    out: set[tuple[str, ...]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            out |= {tuple(a.name.split(".")) for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level] if node.level else ()
            module = (*base, *filter(None, (node.module or "").split(".")))
            out |= {(*module, a.name) for a in node.names} if module in PACKAGES else {module}
    return out


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_downward(path: Path) -> None:
    room = home(path)
    assert room in ROOMS, f"{room} is not in the table of rooms: draw its floor first"
    for target in imports(ast.parse(path.read_text()), path):
        if target[0] == "hpcgpu" and len(target) > 1:
            assert target[1] in ROOMS[room] | {room} or target[1].startswith("__"), f"{room} may not import {target}"


@pytest.mark.parametrize("path", sorted((ROOT / "deploy").glob("*/*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_inside_deploy_go_downward(path: Path) -> None:
    room = path.relative_to(ROOT).parts[1]
    assert room in DEPLOY, f"deploy/{room} is not in the table of rooms: draw its floor first"
    targets = imports(ast.parse(path.read_text()), path)
    there = {target[2] for target in targets if target[:2] == ("hpcgpu", "deploy") and len(target) > 2}
    assert there <= DEPLOY[room] | {room}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_outside_imports(path: Path) -> None:
    import sys

    room = home(path)
    for target in imports(ast.parse(path.read_text()), path):
        name = target[0]
        if name in ("hpcgpu", "__future__"):
            continue
        glue = (room, path.stem) in DASK_GLUE and (name == "dask" or target[:2] == ("distributed", "protocol"))
        if name in sys.stdlib_module_names:
            allowed = room not in PURE or (name not in MACHINE and target[:2] != ("importlib", "metadata"))
        else:
            allowed = glue or name in OUTSIDE.get(room, set())
        assert allowed, f"{room} may not import {'.'.join(target)}"


@pytest.mark.parametrize("path", [p for p in FILES if home(p) in PURE], ids=lambda p: str(p.relative_to(ROOT)))
def test_pure_rooms_do_not_open_files(path: Path) -> None:
    calls = [n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    assert not [c for c in calls if isinstance(c, ast.Name) and c.id in ("open", "exec", "eval", "__import__")]


@pytest.mark.parametrize("path", [p for p in FILES if home(p) == "agent"], ids=lambda p: str(p.relative_to(ROOT)))
def test_agent_is_light_at_the_top(path: Path) -> None:
    """A rank that only waits must not pay for the import of distributed (facts: .4 CPU s each)."""
    import sys

    body = [n for n in ast.parse(path.read_text()).body if not is_type_checking(n)]
    top = [n for n in body if isinstance(n, (ast.Import, ast.ImportFrom))]
    for target in imports(ast.Module(body=list(top), type_ignores=[]), path):
        if target[0] == "hpcgpu":
            assert target[1] in AGENT_TOP, target
        else:
            assert target[0] in sys.stdlib_module_names, target


def test_distributed_is_imported_by_deploy_and_agent_only() -> None:
    users = {home(p) for p in FILES for t in imports(ast.parse(p.read_text()), p) if t[0] == "distributed"}
    assert users <= {"deploy", "agent", "sim", "spill"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_size(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno + 1 <= 50, f"{node.name} is over 50 lines"
