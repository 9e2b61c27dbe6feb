"""The doctor in a job: nodes gather their facts, listen, connect to each other, and write the facts."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from hpcgpu.config import document
from hpcgpu.deploy import start
from hpcgpu.deploy.doctor import exchange, looks, ranks, ucx_link
from hpcgpu.deploy.doctor.exchange import CERTIFICATE, Listening, Order
from hpcgpu.deploy.network import lease
from hpcgpu.errors import HpcGpuError
from hpcgpu.host import probes, process
from hpcgpu.host.knocking import Answer, Endpoint, Listener, probe_often
from hpcgpu.plan.doctor.facts import Link

_MEET_S = 30.0  # for the other nodes to come, and for the login node to have knocked
_POLL_S = 0.1
_NODES_S = 120.0


def knock(source: str, target: Listening, order: Order, folder: Path) -> tuple[Link, ...]:
    """Connect to a machine at each of its addresses, by TCP and then by TLS: its handshakes keep a CPU busy."""
    return tuple(
        link for protocol in ("tcp", "tls") for link in _knock_by(protocol, source, target, order, folder / CERTIFICATE)
    )


def _knock_by(protocol: str, source: str, target: Listening, order: Order, certificate: Path) -> list[Link]:
    places = [place for place in target.where if place.protocol == protocol]
    knocks = {str(i): partial(probe_often, place, order.token, certificate) for i, place in enumerate(places)}
    seen, why = probes.gather(knocks, _MEET_S)
    answers = seen | {i: Answer(error=text) for i, text in why.items()}
    return [_link(source, target, place, answers[str(i)]) for i, place in enumerate(places)]


def _link(source: str, target: Listening, place: Endpoint, answer: Answer) -> Link:
    return Link(
        source=source,
        target=target.host,
        interface=place.interface,
        address=place.address,
        protocol=place.protocol,
        **answer._asdict(),
    )


def on_nodes(folder: Path) -> int:
    """Have each node of this job gather its facts; return the launcher's exit code, or raise HpcGpuError."""
    settings = document.read(exchange.read_order(folder).run).settings
    silent_s = settings.client_grace_s
    if not lease.is_held(folder, silent_s):
        raise HpcGpuError(f"the doctor that submitted this job has given no sign of life for {silent_s:g} s")
    exchange.write(folder, exchange.LAUNCHER, ranks.look(settings))
    launch = start.node_launch(process.python_argv("hpcgpu", "doctor", "--on-node", str(folder)))
    done = ranks.run(launch, _NODES_S)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode


def on_node(folder: Path) -> None:
    """Gather this node's facts and connections until all others have knocked; HpcGpuError without a shared home."""
    order, host = exchange.read_order(folder), os.uname().nodename
    with contextlib.closing(Listener(order.token, folder / CERTIFICATE)) as listener, _UcxServer(order) as server:
        where = (*listener.where, *server.places(listener.where))
        exchange.write_listening(folder, Listening(host=host, where=where, no_ucx=server.why_not))
        facts = looks.look(document.read(order.run).settings)
        met = _until(lambda: len(exchange.read_listening(folder)) >= order.nodes)
        others = [there for there in exchange.read_listening(folder) if there.host != host]
        links = [link for other in others for link in knock(host, other, order, folder)]
        more, why_not = _knock_by_ucx(host, others, order, server.why_not)
        exchange.write_node(folder, replace(facts, links=(*links, *more), no_ucx_links=why_not))
        if met:
            known = folder / exchange.KNOCKED
            _until(lambda: known.exists() and len(exchange.read_nodes(folder)) >= order.nodes)


class _UcxServer:
    """UCX's listener on this node, if it has one."""

    def __init__(self, order: Order) -> None:
        self.why_not = ""
        self._server: ucx_link.Server | None = None
        if order.nodes < 2:
            self.why_not = "one node only"
        elif not ucx_link.is_there():
            self.why_not = ucx_link.NOT_THERE
        else:
            try:
                self._server = ucx_link.Server(order.token)
            except RuntimeError as error:
                self.why_not = str(error)

    def places(self, where: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
        """Return UCX's endpoints: it uses IPv4, at all addresses."""
        port = self._server.port if self._server else 0
        found = [place for place in where if place.protocol == "tcp" and "." in place.address]
        return tuple(Endpoint(p.interface, p.address, port, "ucx") for p in found if port)

    def __enter__(self) -> _UcxServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server:
            self._server.close()


def _knock_by_ucx(source: str, others: Sequence[Listening], order: Order, why_not: str) -> tuple[list[Link], str]:
    """Connect to the others by UCX; return also why not, if no connection was tried."""
    there = [(other, place) for other in others for place in other.where if place.protocol == "ucx"]
    if why_not or not there:
        return [], why_not or next((other.no_ucx for other in others), "no other node has come")
    try:
        answers = ucx_link.knock_all([place for _, place in there], order.token)
    except RuntimeError as error:
        answers = (Answer(error=str(error)),) * len(there)
    return [_link(source, *pair, answer) for pair, answer in zip(there, answers, strict=True)], ""


def _until(is_true: Callable[[], bool]) -> bool:
    """Poll the shared folder until ``is_true``, or too late: a file on another machine sends no signal."""
    end_s = time.monotonic() + _MEET_S
    while not (found := is_true()) and time.monotonic() < end_s:
        time.sleep(_POLL_S)
    return found
