"""What a test leaves behind is found, and named."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import leaks
import pytest
from waiting import until


@contextlib.contextmanager
def thread() -> Iterator[str]:
    stop = threading.Event()
    waiting = threading.Thread(target=stop.wait, name="waits for nothing")
    waiting.start()
    yield "thread waits for nothing"
    stop.set()
    waiting.join()


@contextlib.contextmanager
def child() -> Iterator[str]:
    process = subprocess.Popen(["sleep", "600"])
    until(lambda: leaks.words(process.pid), "it is another program")
    yield f"child process {process.pid}: sleep 600"
    process.kill()
    process.wait()


@contextlib.contextmanager
def listener() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"descriptor {server.fileno()}: socket:["


@contextlib.contextmanager
def file() -> Iterator[str]:
    with Path(__file__).open() as opened:
        yield f"descriptor {opened.fileno()}: {__file__}"


@pytest.mark.parametrize("made", [thread, child, listener, file])
def test_what_a_process_has_itself_is_named(made: Callable[[], contextlib.AbstractContextManager[str]]) -> None:
    with contextlib.ExitStack() as stack:
        before = leaks.Before.now()
        wanted = stack.enter_context(made())
        assert any(left.startswith(wanted) for left in before.left())
    assert before.left() == []


def test_a_process_that_is_nobodys_child_any_more_is_named_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "LIMIT_S", 2.0)
    code = (
        "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3, start_new_session=True).pid)"
    )
    with pytest.raises(AssertionError, match=r"left behind: process \d+: sleep 600"), leaks.no_process_left(tmp_path):
        pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert not leaks.words(pid)


def test_a_file_in_the_temporary_folder_is_named_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "LIMIT_S", 0.1)
    before = os.environ.get("TMPDIR")
    with pytest.raises(AssertionError, match="left behind: forgotten"), leaks.no_process_left(tmp_path) as folder:
        (folder / "forgotten").touch()
    assert not folder.exists()
    assert os.environ.get("TMPDIR") == before
