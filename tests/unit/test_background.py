"""Background work is started by hpcgpu.supervise, so that where it starts it says what happens when it raises."""

import ast
from collections.abc import Iterator

from paths import PACKAGE
from sources import MODULES, parsed, qualified

FILES = [path for path in MODULES if path.name != "supervise.py"]
# What starts something that raises where nobody looks.
STARTS = {
    *("Thread", "Timer", "start_new_thread", "ThreadPoolExecutor", "ProcessPoolExecutor"),
    *("create_task", "ensure_future", "run_coroutine_threadsafe", "run_in_executor", "TaskGroup"),
    *("PeriodicCallback", "spawn_callback"),
}
# What takes a callback, which is to be guarded.
CALLBACKS = {
    *("add_reader", "add_writer", "add_signal_handler", "call_later", "call_at", "call_soon", "call_soon_threadsafe"),
    *("add_callback", "add_done_callback"),
}
# In which function, what is called, and why that may be.
EXCEPTIONS = {
    ("agent/leader.py", "ForcedEnd.__init__", "Thread"): "it ends the process whatever is raised",
    ("agent/leader.py", "Leader.run", "add_signal_handler"): "_answer returns a callback of log_errors",
    ("agent/leader.py", "Leader.run", "create_task"): "awaited in the same function",
    ("agent/leader.py", "Leader.start_workers", "create_task"): "hear_goodbye awaits it",
    ("agent/rank0.py", "Rank0Leader._log_summary", "ensure_future"): "awaited in the same function",
    ("agent/rank0.py", "Rank0Leader.serve", "add_done_callback"): "it sets an event",
    ("agent/missing_ranks.py", "MissingRanks.watched", "Timer"): "if it does not end the process, faulthandler does",
    ("agent/member.py", "Member._end_in", "call_later"): "it sets an event",
    ("agent/member.py", "Member._stay", "ensure_future"): "awaited in the same function",
    ("deploy/cluster/cluster.py", "GPUCluster._close", "create_task"): "awaited in the same function",
    ("deploy/cluster/cluster.py", "GPUCluster.sync", "ensure_future"): "the caller's to await; asyncio says it",
    ("deploy/cluster/cluster.py", "GPUCluster.sync", "add_done_callback"): "it forgets a task that is over",
    ("deploy/cluster/reported.py", "ReportedCluster._widget", "add_callback"): "it starts a loop that is supervised",
    ("deploy/cluster/connection.py", "Connection._reopen", "create_task"): "awaited in the same function",
    ("deploy/compat.py", "end_clients", "add_callback"): "tornado logs what a coroutine raises",
    ("deploy/network/data_connections.py", "Channel._start", "run_coroutine_threadsafe"): "moves are awaited",
    ("deploy/network/data_connections.py", "", "ThreadPoolExecutor"): "in_thread alone uses it",
    ("deploy/network/data_connections.py", "in_thread", "run_in_executor"): "its callers await it",
    ("deploy/network/node_copies.py", "_Lender.give_back", "call_soon_threadsafe"): "it releases a semaphore",
    ("deploy/network/node_copies.py", "NodeTCP.write", "add_done_callback"): "it ends the connection",
    ("deploy/network/scheduler_file.py", "connect_first", "create_task"): "awaited in the same function",
    ("deploy/processes/polars_engine.py", "", "ThreadPoolExecutor"): "_in_thread alone uses it",
    ("deploy/processes/polars_engine.py", "_in_thread", "run_in_executor"): "awaited in the same function",
    ("deploy/processes/removals.py", "PacedScheduler._may_go_on", "call_soon"): "it sets a value",
    ("deploy/processes/scheduler.py", "EndingScheduler.gather", "ensure_future"): "awaited in the same function",
    ("deploy/processes/saving.py", "retire", "create_task"): "awaited in the same function",
    ("deploy/site_files.py", "as_it_is", "ThreadPoolExecutor"): "the caller waits for answers, and gets what it raises",
    ("deploy/doctor/probes.py", "gather", "Thread"): "what a look raises is said as the reason why nothing was seen",
    ("deploy/doctor/node.py", "Listener.__init__", "Thread"): "who connects gets no answer, and says so",
    ("spill/storage/pinned.py", "_threads", "ThreadPoolExecutor"): "_in_threads waits, and gets what it raises",
    ("host/process.py", "_polled", "Thread"): "it closes a pipe whatever is raised",
    ("host/run.py", "ended", "add_reader"): "it sets an event",
    ("host/run.py", "run", "create_task"): "awaited in the same function",
}


def name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def bare(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield function and callee of each start of background work that nothing supervises."""

    def is_guard(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and name(node) == "log_errors"

    made = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and is_guard(node.value)]
    guards = {ast.unparse(target) for node in made for target in node.targets}
    for function, call in ((name, node) for name, node in qualified(tree) if isinstance(node, ast.Call)):
        takes_bare = name(call) in CALLBACKS and not any(is_guard(a) or ast.unparse(a) in guards for a in call.args)
        if name(call) in STARTS or takes_bare:
            yield function, name(call)


def test_background_work_is_started_by_supervise() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), function, callee) for path in FILES for function, callee in bare(parsed(path))
    }
    new = sorted(found - EXCEPTIONS.keys())
    assert not new, f"{new}: start it by hpcgpu.supervise, which asks what happens when it raises"
    assert EXCEPTIONS.keys() <= found, "an exception is left that nothing needs"
