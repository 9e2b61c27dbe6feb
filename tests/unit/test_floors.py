"""The house stands: who may import whom, who may touch the machine, and how large a thing may grow."""

import ast
import graphlib
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from paths import PACKAGE
from sources import MODULES as FILES
from sources import parsed

LOW = {"errors", "light_typing", "units"}
FLOOR2 = {"topology", "batch", "launch", "config"}
BELOW_AGENT = LOW | FLOOR2 | {"model", "supervise", "plan", "report", "pictures", "host"}
BELOW_AGENT |= {"spill", "sim", "deploy"}
# Which rooms of hpcgpu a room may import, beside itself (docs/house.md). A room that is not here fails.
ROOMS: dict[str, set[str]] = {
    "__init__": set(),
    "__main__": {"cli"},
    "worker": {"cli"},  # python -m hpcgpu.worker
    "light_typing": set(),
    "errors": {"light_typing"},
    "units": {"errors"},
    "model": LOW,
    **dict.fromkeys(FLOOR2, LOW | {"model"}),
    "plan": LOW | {"model"},
    "report": LOW | {"model", "plan"},
    "pictures": LOW | {"model", "plan", "report"},
    "sim": LOW | {"model"},
    "supervise": LOW | {"model"},
    "spill": LOW | {"model", "supervise", "host"},
    "host": LOW | {"model", "supervise", "topology"},
    "deploy": LOW | FLOOR2 | {"model", "supervise", "plan", "report", "pictures", "host", "spill", "sim"},
    "checkpoint": LOW | {"model", "supervise", "batch", "launch", "report", "host", "spill", "deploy"},
    "agent": BELOW_AGENT,
    "cli": BELOW_AGENT | {"agent", "checkpoint"},
}
# The same for the rooms inside deploy; a module of deploy itself may import all of them.
DEPLOY: dict[str, set[str]] = {
    "network": set(),
    "dashboard": set(),
    "processes": {"network", "dashboard", "compat", "settings", "dask_config"},
    "jobs": {"network", "settings"},
    "doctor": {"network", "jobs", "settings", "start"},
    "cluster": {
        "network",
        "dashboard",
        "processes",
        "jobs",
        "compat",
        "dask_config",
        "settings",
        "start",
        "preview",
        "progress",
    },
}
# And for the rooms inside spill, the lowest first: each may import those before it.
SPILL = ("state", "storage", "devices", "values", "proxies", "store", "distributed")
# And for the rooms inside plan, likewise.
PLAN = ("binding", "jobs", "doctor")
PURE = {*LOW, "model", "plan", "report", "pictures"} | FLOOR2
STATE = ("hpcgpu", "spill", "state")  # the store's decisions: pure, and nothing of the store below them
MACHINE = {
    *("os", "pathlib", "subprocess", "socket", "asyncio", "threading", "time", "ctypes", "signal", "multiprocessing"),
    *("tempfile", "pkgutil", "shutil", "io", "glob", "fcntl", "select", "selectors"),
}
OUTSIDE: dict[str, set[str]] = {  # what is not the standard library, and pure rooms' few exceptions
    "config": {"msgspec", "yaml"},
    "batch": set(),
    "report": {"rich"},
    "sim": {"numpy"},
    "spill": {"numpy", "wrapt", "cupy", "cuda"} | {"torch", "numba", "rmm", "jax"},  # by who has objects of theirs
    **{room: {"distributed", "dask", "numpy"} for room in ("spill/distributed", "spill/preload.py")},
    "host": {"psutil", "pynvml", "cryptography", "msgspec"},
    "deploy": {"distributed", "dask", "tornado", "numpy", "psutil", "rich", "cryptography", "bokeh", "msgspec"}
    | {"distributed_ucxx", "ucxx"}  # deploy/network/ucx.py
    | {"IPython", "ipywidgets", "jupyter_core"}  # in a notebook
    | {"rmm", "cupy", "torch", "wrapt"},  # deploy/processes: rmm.py, worker.py
    "checkpoint": {"distributed", "dask", "numpy", "cupy", "msgspec"},
    "agent": {"mpi4py", "distributed", "dask", "numpy", "psutil"},
    "cli": {"click", "rich"},
    "worker": {"click"},
}
# dask and distributed.protocol
DASK_GLUE = {"sim/registration.py"} | {
    f"spill/{name}.py" for name in ("store/messages", "proxies", "storage/disk", "values/host_objects")
}
PACKAGES = {("hpcgpu",), ("hpcgpu", "deploy"), ("hpcgpu", "spill"), ("hpcgpu", "plan")}
AGENT_TOP = {*LOW, "model", "supervise", "launch", "host", "agent"}
# Of leaders, which import them after their fork server has imported distributed.
LEADERS = {("hpcgpu", "agent", name) for name in ("leader", "member", "rank0", "standalone")}
MOST_SIBLINGS = 8
# What makes sense together only is one module, as long as a reader can hold it in mind.
MOST_LINES = 500
# Private names of other modules that a module may touch, and why.
OVERRIDDEN = "distributed's Cluster has it, and calls or reads it itself"
INHERITED = "hpcgpu's own base class has it, and a public name of a cluster object is for people"
PRIVATE: dict[str, dict[str, str]] = {
    "deploy/cluster/classes.py": dict.fromkeys(("_connection", "_must_run"), INHERITED),
    "deploy/cluster/cluster.py": {
        **dict.fromkeys(
            ("_absent", "_ask_summary", "_asking", "_check_absent", "_line", "_must_run", "_show_end", "_state"),
            INHERITED,
        ),
        **dict.fromkeys(("_sync_cluster_info_task", "_adaptive", "_cluster_manager_logs", "_loop_runner"), OVERRIDDEN),
    },
    "deploy/cluster/reported.py": {"_cluster_class_name": OVERRIDDEN},
    "deploy/network/node_copies.py": dict.fromkeys(
        ("_write_buffer", "_total_write_index"),
        "distributed, too, enqueues a message at once; tornado has no other way",
    ),
    "deploy/processes/polars_engine.py": {"_bind_done": "cudf-polars' own mark of a bound process; it has no other"},
    "spill/distributed/shuffles.py": dict.fromkeys(
        ("_core", "_mean_shard_size", "_send"), "compat.py of the store, which any worker of Dask can have"
    ),
    "deploy/network/ucx.py": {"_ep": "distributed-ucxx has no other way to the endpoint of a connection"},
    "light_typing.py": dict.fromkeys(
        ("_field_defaults", "_tuplegetter"), "what collections.namedtuple has, which takes each rank 3 CPU ms more"
    ),
    "host/discover.py": {"_handle": "ctypes has no other way to close a library"},
    "sim/registration.py": dict.fromkeys(
        ("_nannumel", "_numel_arraylike"), "dask registers these for numpy under no public name"
    ),
    "spill/devices/allocation_failure.py": {
        "_get_running_loop": "asyncio's way without an exception, which costs more"
    },
    "spill/devices/pools.py": {"_backward_hooks": "torch has no other way to ask for a tensor's hooks"},
    "spill/values/host_objects.py": {"_mgr": "pandas has no other way to a frame's memory without an array per column"},
}
# Of os; of named tuples, which cannot name them otherwise.
OF_THE_LANGUAGE = {"_exit", "_replace", "_asdict", "_fields"}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def home(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_pure(path: Path) -> bool:
    return home(path) in PURE or path.relative_to(PACKAGE.parent).parts[:3] == STATE


def imports(path: Path, tree: ast.AST | None = None, *, names: bool = False) -> set[tuple[str, ...]]:
    """Every imported module as a tuple, or every name; ``from hpcgpu import x`` is ``hpcgpu.x``, so from a floor."""
    package = path.relative_to(PACKAGE.parent).with_suffix("").parts
    out: set[tuple[str, ...]] = set()
    for node in ast.walk(tree or parsed(path)):
        if isinstance(node, ast.Import):
            out |= {tuple(a.name.split(".")) for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level] if node.level else ()
            module = (*base, *filter(None, (node.module or "").split(".")))
            out |= {(*module, a.name) for a in node.names} if names or module in PACKAGES else {module}
    return out


def modules_used() -> dict[str, set[str]]:
    """Return which modules of the package each one imports, at the top, for types only and in functions."""
    files = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): p for p in FILES}
    uses: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for target in imports(path, names=True):
            named, module = ".".join(target), ".".join(target[:-1])
            uses[name] |= {named if named in files else module} & files.keys() - {name}
    return uses


def test_imports_go_downward() -> None:
    assert {home(path) for path in FILES} <= ROOMS.keys(), "a room is not in the table: draw its floor first"
    wrong = [
        (name_of(path), ".".join(target))
        for path in FILES
        for target in imports(path)
        if target[0] == "hpcgpu" and len(target) > 1 and not target[1].startswith("__")
        if target[1] not in ROOMS[home(path)] | {home(path)}
    ]
    assert wrong == []


def lowest_first(rooms: Sequence[str]) -> dict[str, set[str]]:
    """Return the rooms that each of these may import: those before it."""
    return {room: set(rooms[:i]) for i, room in enumerate(rooms)}


INSIDE = {"deploy": DEPLOY, "spill": lowest_first(SPILL), "plan": lowest_first(PLAN)}


def test_imports_inside_a_floor_go_downward() -> None:
    wrong = []
    for path in (p for floor in INSIDE for p in (PACKAGE / floor).rglob("*.py") if p.parent != PACKAGE / floor):
        floor, room = path.relative_to(PACKAGE).parts[:2]
        assert room in INSIDE[floor], f"{floor}/{room} is not in the table of rooms: draw its floor first"
        there = {target[2] for target in imports(path) if target[:2] == ("hpcgpu", floor) and len(target) > 2}
        wrong += [(name_of(path), other) for other in there - INSIDE[floor][room] - {room}]
    assert wrong == []


def test_the_picture_names_all_rooms() -> None:
    words = set(re.findall(r"\w+", (PACKAGE.parent / "docs" / "house.md").read_text().split("```")[1]))
    rooms = {home(path) for path in FILES} - {"__init__", "__main__", "worker"}
    assert (rooms | DEPLOY.keys() | {*SPILL, *PLAN}) - words == set()


def test_the_state_of_the_store_knows_nothing_of_the_store() -> None:
    files = [path for path in FILES if path.relative_to(PACKAGE.parent).parts[:3] == STATE]
    targets = {target for path in files for target in imports(path) if target[0] == "hpcgpu"}
    assert files
    assert all(target[:3] == STATE or target[1] in LOW | {"model"} for target in targets)


def test_accounting_alone_changes_its_counts() -> None:
    """Law 1 of the machine is kept by one class; nobody else reads the machine's private accounting."""
    tree = parsed(PACKAGE / "spill" / "state" / "machine.py")
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Attribute, ast.Subscript))]
    changed = [ast.unparse(node) for node in nodes if not isinstance(node.ctx, ast.Load)]
    assert [name for name in changed if "accounting." in name] == []


def test_no_circle_of_modules() -> None:
    """Imports for types only and in functions count: modules that need each other are one module."""
    uses = modules_used()
    assert "hpcgpu.config" in uses["hpcgpu.agent.__main__"], "an import in a function does not count"
    assert "hpcgpu.agent.fork_server" in uses["hpcgpu.agent.__main__"], "an import for types does not count"
    graphlib.TopologicalSorter(uses).prepare()


def test_a_module_needs_few_of_its_room() -> None:
    for name, used in modules_used().items():
        siblings = {other for other in used if other.rpartition(".")[0] == name.rpartition(".")[0]}
        assert len(siblings) <= MOST_SIBLINGS, name


def may_be_imported(target: tuple[str, ...], path: Path) -> bool:
    """Tell whether a module may import this one, as far as what is not ours goes."""
    name, rooms = target[0], (home(path), "/".join(path.relative_to(PACKAGE).parts[:2]))
    if name in ("hpcgpu", "__future__"):
        return True
    if name in sys.stdlib_module_names:
        return not is_pure(path) or (name not in MACHINE and target[:2] != ("importlib", "metadata"))
    glue = name_of(path) in DASK_GLUE and (name == "dask" or target[:2] == ("distributed", "protocol"))
    return glue or any(name in OUTSIDE.get(room, set()) for room in rooms)


def test_outside_imports() -> None:
    wrong = [(name_of(p), ".".join(t)) for p in FILES for t in imports(p) if not may_be_imported(t, p)]
    assert wrong == []


def test_pure_rooms_do_not_open_files() -> None:
    wrong = [
        (name_of(path), node.func.id)
        for path in filter(is_pure, FILES)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in ("open", "exec", "eval", "__import__")
    ]
    assert wrong == []


def test_agent_is_light_at_the_top() -> None:
    """A rank that only waits must not pay for the import of distributed (facts: .4 CPU s each)."""
    light_files = [path for path in FILES if home(path) == "agent" and ("hpcgpu", "agent", path.stem) not in LEADERS]
    for path in light_files:
        top = [n for n in parsed(path).body if isinstance(n, (ast.Import, ast.ImportFrom))]
        for target in imports(path, ast.Module(body=list(top), type_ignores=[])):
            light = target[1] in AGENT_TOP if target[0] == "hpcgpu" else target[0] in sys.stdlib_module_names
            assert light and target[:3] not in LEADERS, (name_of(path), target)


def test_size() -> None:
    assert {name_of(path) for path in FILES if path.read_bytes().count(b"\n") > MOST_LINES} == set(), "divide it"
    wrong = [
        (name_of(path), node.name)
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (node.end_lineno or 0) - node.lineno + 1 > 70
    ]
    assert wrong == [], "over 70 lines"


def test_top_level_name_is_assigned_once_in_a_module() -> None:
    """Two modules that are merged may have a constant of one name: the later one would count for both."""
    wrong = []
    for path in FILES:
        nodes = [node for node in parsed(path).body if isinstance(node, (ast.Assign, ast.AnnAssign))]
        targets = [t for node in nodes for t in (node.targets if isinstance(node, ast.Assign) else [node.target])]
        names = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name) and is_stored(n)]
        wrong += [(name_of(path), name) for name in sorted(set(names)) if names.count(name) > 1]
    assert wrong == []


def test_a_face_defines_nothing() -> None:
    """Its rooms have names, in tabs, tracebacks and profiles; some faces load what they re-export at the first use."""
    for path in (path for path in FILES if path.name == "__init__.py"):
        assert path.read_bytes().count(b"\n") <= 40, name_of(path)
        defined = {n.name for n in parsed(path).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        assert defined <= {"__getattr__", "__dir__"}, name_of(path)


def test_constants_stand_at_the_top() -> None:
    """Before functions and classes, but for what is made of these."""
    for path in FILES:
        defined: set[str] = set()
        for node in parsed(path).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and defined and node.value:
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                assert names & defined, f"{name_of(path)}:{node.lineno}"
                defined |= names


def is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def private_names_of_others(tree: ast.AST) -> set[str]:
    """Return the private names that a module reads, writes or imports, and does not define."""
    own: set[str] = set()
    touched: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute):
            mine = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (own if mine and isinstance(node.ctx, ast.Store) else touched).add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            touched |= {alias.name for alias in node.names}
        if isinstance(node, ast.Assign) and "__slots__" in map(ast.unparse, node.targets):
            own |= set(ast.literal_eval(node.value))
    return {name for name in touched - own if name.startswith("_") and not name.endswith("__")}


def test_no_module_touches_private_names_of_others() -> None:
    """All private names of distributed that are touched, but those overridden, stand in compat.py."""
    names = {name_of(p): private_names_of_others(parsed(p)) - OF_THE_LANGUAGE for p in FILES}
    found = {name: touched for name, touched in names.items() if touched and name != "deploy/compat.py"}
    allowed = {name: set(why) for name, why in PRIVATE.items()}
    assert found == allowed, "mend it, or say above why it must be; take out what is mended"


def test_no_neighbour_of_the_demo_hides_a_library() -> None:
    """It is run as a script, which finds its own folder before all others."""
    neighbours = {p.stem for p in (PACKAGE / "deploy").iterdir()} - {"__pycache__", "__init__"}
    assert not neighbours & {*sys.stdlib_module_names, *metadata.packages_distributions()}
