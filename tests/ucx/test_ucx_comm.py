"""Connections of UCX: their readers can be cancelled, they end, they cost nothing at rest, and values go by them."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from paths import SUPPORT
from waiting import scaled, until

# Each in a process of its own: UCX stays in one, with its sockets, to its end.
BOTH = """
import asyncio, os, sys
from distributed.comm import CommClosedError, connect, listen
from hpcgpu.deploy import network
network.prepare("ucx:")

async def echo(comm):
    try:
        while True:
            await comm.write(await comm.read())
    except CommClosedError:
        pass

async def both():
    listener = await listen("ucx://127.0.0.1:0", echo)
    comm = await connect(listener.contact_address)
    await comm.write("x")
    assert await comm.read() == "x"
    return listener, comm

def run(main):
    asyncio.run(main())
    sys.stdout.flush()
    os._exit(0)
"""


def program(code: str) -> str:
    return f"{BOTH}\n{textwrap.dedent(code)}\nrun(main)\n"


def python(code: str, *arguments: str) -> str:
    argv, env = [sys.executable, "-c", program(code), *arguments], {"PYTHONPATH": str(SUPPORT)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(150), env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_reader_that_is_cancelled_is_cancelled() -> None:
    """Not told that the connection is closed, as by distributed-ucxx: then it would go on with that."""
    code = """
        async def main():
            listener, comm = await both()
            reading = asyncio.create_task(comm.read())
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
            print(reading.cancelled(), comm.closed())
            try:
                async with asyncio.timeout(0):
                    await (await connect(listener.contact_address)).read()
            except TimeoutError:
                print("too late")
            other = await connect(listener.contact_address)
            reading = asyncio.create_task(other.read())
            await asyncio.sleep(0.1)
            other.abort()  # its reader hears of that
            try:
                await asyncio.wait_for(reading, 20)
            except CommClosedError:
                print("closed")
    """
    assert python(code).splitlines()[:3] == ["True True", "too late", "closed"]


def test_what_is_given_up_does_no_harm() -> None:
    """Connections in the making, and messages: UCX writes to their buffers later, which ucxx has freed then."""
    code = """
        async def main():
            listener, comm = await both()
            for i in range(60):
                try:
                    async with asyncio.timeout(i * 2e-4):
                        other = await connect(listener.contact_address)
                        await other.write(b"x" * 100_000)
                        await other.read()
                except TimeoutError:
                    pass
            data = bytes(range(256)) * 40_000
            await comm.write(data)
            assert await comm.read() == data
            print("well")
    """
    assert python(code) == "well\n"


def test_nothing_turns_while_a_message_is_awaited() -> None:
    """Each process awaits some all the time; with ucxx alone the event loop turns 100,000 times a second."""
    code = """
        async def main():
            listener, comm = await both()
            reading = asyncio.create_task(comm.read())
            selector, turns = asyncio.get_running_loop()._selector, 0
            select = selector.select
            def count(timeout=None):
                nonlocal turns
                turns += 1
                return select(timeout)
            selector.select = count
            await asyncio.sleep(2)
            print(turns)
            await comm.write(b"y" * 10_000_000)
            print(len(await reading))
    """
    turns, size = map(int, python(code).split())
    assert turns < 50
    assert size == 10_000_000


def test_a_connection_closes_whose_peer_is_stopped_or_killed(tmp_path: Path) -> None:
    serve = """
        async def main():
            listener = await listen("ucx://127.0.0.1:0", echo)
            print(listener.contact_address, flush=True)
            await asyncio.Event().wait()
    """
    talk = """
        async def main():
            comms = [await connect(sys.argv[1]) for _ in range(3)]
            readers = [asyncio.create_task(comm.read()) for comm in comms]
            print("here", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            await asyncio.wait_for(comms[0].close(), 20)
            print("closed", comms[0].closed(), flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            for reader in readers:
                try:
                    await asyncio.wait_for(reader, 40)
                except CommClosedError:
                    print("end", flush=True)
    """
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    argv = [sys.executable, "-c"]
    with subprocess.Popen([*argv, program(serve)], **pipe) as server:
        try:
            address = server.stdout.readline().strip()
            with subprocess.Popen([*argv, program(talk), address], **pipe) as client:
                assert client.stdout.readline() == "here\n"
                os.kill(server.pid, signal.SIGSTOP)
                client.stdin.write("\n")
                client.stdin.flush()
                assert client.stdout.readline() == "closed True\n"
                os.kill(server.pid, signal.SIGKILL)
                out, _ = client.communicate("\n", timeout=scaled(60))
                assert out.split() == ["end"] * 3
        finally:
            server.kill()
    assert until(lambda: server.returncode is not None, "the server's end")


def test_the_event_loop_of_others_is_left_alone() -> None:
    """A process that speaks UCX runs another event loop later."""
    code = """
        async def main():
            listener, comm = await both()
            await comm.close()
            listener.stop()
        asyncio.run(main())
    """
    assert python(code) == ""


@pytest.mark.parametrize("mode", ["whole", "jit"])
def test_all_paths_by_ucx_give_user_code_values(tmp_path: Path, mode: str) -> None:
    """No handle, and no proxy of another store; ``process/deploy/test_comms.py`` has the other protocols."""
    code = """
        import json
        from pathlib import Path
        from hpcgpu import sim
        from hpcgpu.sim import register
        from store_clusters import by_all_paths, cluster, strange

        async def main():
            sim.set_current_gpu(sim.SimGpu(64 << 20))
            register()
            options = dict(plugin=True, jit_unspill=sys.argv[2] == "jit", protocol="ucx")
            async with cluster(Path(sys.argv[1]), **options) as (client, a, b):
                met = await by_all_paths(client, a, b)
                moves = [a.data.counters[way].number + b.data.counters[way].number for way in a.data.counters]
                print(json.dumps([len(met), strange(met), min(moves)]))
                sys.stdout.flush()
                os._exit(0)
    """
    paths, met, moves = json.loads(python(code, str(tmp_path / "tmp"), mode).splitlines()[-1])
    assert (paths > 10, met, moves > 0) == (True, {}, True)


def test_event_loop_turns_while_device_memory_waits_for_its_work() -> None:
    """Both ways, once a message; the memory here is the host's, and the loop itself ends the device's work."""
    code = """
        import threading
        import numpy as np
        from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
        from distributed_ucxx import ucxx as theirs

        class OnDevice:
            def __init__(self, nbytes):
                self.bytes, self.nbytes = np.zeros(nbytes, "u1"), nbytes
            def __len__(self):
                return self.nbytes
            @property
            def __cuda_array_interface__(self):
                return {**self.bytes.__array_interface__, "version": 3}

        waits, is_done = [], threading.Event()
        def wait(device=0):
            waits.append(is_done.wait(20) and threading.current_thread() is not threading.main_thread())
        cuda_serialize.register(OnDevice, lambda x: ({}, [x, x]))
        cuda_deserialize.register(OnDevice, lambda header, frames: frames[1])

        async def main():
            from distributed.protocol import to_serialize
            listener, comm = await both()
            import ucxx._cuda_context
            ucxx._cuda_context.synchronize_default_stream = wait
            theirs.device_array = OnDevice
            for round in range(2):
                is_done.clear()
                sent = OnDevice(3000)
                sent.bytes[:] = round + 1
                write = asyncio.create_task(comm.write({"x": to_serialize(sent)}))
                asyncio.get_running_loop().call_later(0.01, is_done.set)
                await write
                got = (await comm.read())["x"].bytes
                assert got.tobytes() == sent.bytes.tobytes()
            print(waits)
    """
    assert python(code) == f"{[True] * 4}\n"  # out, and in at the echo, of two messages
