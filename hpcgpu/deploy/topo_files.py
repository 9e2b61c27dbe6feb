"""Files that describe machines: what is in them, and in whose line they go wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hpcgpu.errors import ConfigError, ParseError
from hpcgpu.model import Topology
from hpcgpu.plan.views.describe import describe, differences
from hpcgpu.topology import document

_STDIN = "-"


def read_machine(name: str) -> Topology:
    """Return the machine of an XML file; ``-`` is what stands on stdin.

    Raises
    ------
    ConfigError
        The file cannot be read.
    ParseError
        It is no topology; with its name, and where it goes wrong.

    """
    return _parsed(_text(name), named(name))


def read_described(name: str) -> dict[str, Any]:
    """Return the machine of an XML file, or of JSON of ``hpcgpu topo``, as :func:`describe` returns it.

    Raises
    ------
    ConfigError, ParseError
        As :func:`read_machine`.

    """
    text = _text(name)
    return parse_described(text, named(name)) if text.lstrip().startswith("{") else describe(_parsed(text, name), ())


def named(name: str) -> str:
    """Return how a file is called in messages."""
    return "stdin" if name == _STDIN else name


def parse_described(text: str, where: str) -> dict[str, Any]:
    """Return what ``hpcgpu topo --json`` printed.

    Raises
    ------
    ConfigError
        It has not printed this.

    """
    expected = "expected what hpcgpu topo --json prints"
    try:
        found = json.loads(text)
        differences({"a": found, "b": found})
    except json.JSONDecodeError as e:
        raise ConfigError(f"{where}, line {e.lineno}: no JSON ({e.msg}); {expected}") from e
    except KeyError as e:
        raise ConfigError(f"{where} has no {e.args[0]!r} where one belongs; {expected}") from e
    except (ValueError, TypeError, AttributeError, RecursionError) as e:
        raise ConfigError(f"{where} has a value of another kind than belongs there; {expected}") from e
    return dict(found)


def _parsed(text: str, where: str) -> Topology:
    try:
        return document.read(text)
    except ParseError as e:
        raise ParseError(f"{where}: {e}", evidence=e.evidence) from e


def _text(name: str) -> str:
    """Return a file's text, or its beginning where it is longer than any topology."""
    try:
        if name == _STDIN:
            return sys.stdin.buffer.read(document.MAX_BYTES + 1).decode("utf-8", "replace")
        with Path(name).open("rb") as file:
            return file.read(document.MAX_BYTES + 1).decode("utf-8", "replace")
    except OSError as e:
        raise ConfigError(
            f"{name} cannot be read: {e.strerror}; give an XML file (lstopo --disallowed --of xml machine.xml)"
        ) from e
