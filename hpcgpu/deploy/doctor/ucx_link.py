"""Connect two nodes by UCX, in separate processes: UCX may hang or crash, and must not take the doctor with it.

``python -m hpcgpu.deploy.doctor.ucx_link serve`` prints its port and serves until its input ends; ``... knock`` reads
one line of JSON for each endpoint, and prints the answer of each. The first line of the input is the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from hpcgpu.host import process
from hpcgpu.host import run as programs
from hpcgpu.host.knocking import CONNECT_S, TRIES, Answer, Endpoint, best_of, read_answer
from hpcgpu.model import Command

_TOO_LATE = 124
_START_S, _TIME = 15.0, 17  # bytes of a time: 1795000000.123456


@contextlib.contextmanager
def served(token: str) -> Iterator[int]:
    """Serve in a process while the context lasts; yield the port, or raise RuntimeError if UCX does not work here."""
    if importlib.util.find_spec("ucxx") is None:
        raise RuntimeError("ucxx is not installed: --protocol ucx needs pip install 'hpcgpu[ucx]'")
    argv, pipe = process.python_argv("hpcgpu.deploy.doctor.ucx_link", "serve"), subprocess.PIPE
    server = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=_environment())
    assert server.stdin
    assert server.stdout
    try:
        server.stdin.write(f"{token}\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], _START_S)[0]:
            raise RuntimeError(f"UCX has not started in {_START_S:g} s")
        if not (port := server.stdout.readline()):
            error = server.communicate()[1]
            raise RuntimeError(_last_line(error) or f"UCX ended with {server.returncode}")
        yield int(port)
    finally:
        server.kill()
        server.communicate()


def knock_all(places: Sequence[Endpoint], token: str) -> tuple[Answer, ...]:
    """Connect to each endpoint by UCX, in a process; raise RuntimeError if UCX does not work here."""
    argv = process.python_argv("hpcgpu.deploy.doctor.ucx_link", "knock")
    typed = "".join(f"{line}\n" for line in (token, *(json.dumps(place) for place in places)))
    limit_s = _START_S + TRIES * CONNECT_S * len(places)
    done = programs.run_sync(Command(argv, stdin=typed, env=_environment(), timeout_s=limit_s))
    answers = tuple(Answer(*json.loads(line)) for line in done.stdout.splitlines())
    if len(answers) < len(places):
        late = f"no answer in {limit_s:g} s" if done.returncode == _TOO_LATE else f"UCX ended with {done.returncode}"
        raise RuntimeError(_last_line(done.stderr) or late)
    return answers


def _environment() -> dict[str, str]:
    return {"UCX_LOG_FILE": "stderr", **os.environ}  # else UCX's warnings stand among the answers


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


async def _serve(token: bytes) -> None:
    import ucxx

    async def answer(endpoint: Any) -> None:  # UCXEndpoint
        message = bytearray(len(token))
        with contextlib.suppress(ucxx.exceptions.UCXError):
            await endpoint.recv(message)
            is_ours = hmac.compare_digest(bytes(message), token)
            await endpoint.send(bytearray(f"{time.time():.6f}".encode() if is_ours else bytes(_TIME)))
            await endpoint.close()

    listener = ucxx.create_listener(answer)
    print(listener.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the doctor ends


async def _knock(address: str, port: int, token: bytes) -> Answer:
    import ucxx

    message = bytearray(_TIME)
    try:
        async with asyncio.timeout(CONNECT_S):
            endpoint = await ucxx.create_endpoint(address, port)
            began_s, before_s = time.perf_counter(), time.time()  # to connect takes UCX longer, whatever the network is
            await endpoint.send(bytearray(token))
            await endpoint.recv(message)
    except TimeoutError:
        return Answer(error="timed out")
    except ucxx.exceptions.UCXError as error:
        return Answer(error=str(error) or type(error).__name__)
    answer = read_answer(message.decode(errors="replace").strip("\0"), time.perf_counter() - began_s, before_s)
    with contextlib.suppress(TimeoutError, ucxx.exceptions.UCXError):
        async with asyncio.timeout(CONNECT_S):
            await endpoint.close()
    return answer


async def _knock_each(token: bytes) -> None:
    for line in sys.stdin:
        _, address, port, _ = json.loads(line)
        answers = [await _knock(address, port, token)]
        while len(answers) < TRIES and not answers[-1].error:
            answers.append(await _knock(address, port, token))
        print(json.dumps(best_of(answers)), flush=True)


if __name__ == "__main__":
    work = {"serve": _serve, "knock": _knock_each}[sys.argv[1]]
    asyncio.run(work(sys.stdin.readline().strip().encode()))
