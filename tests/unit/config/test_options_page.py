"""The page of all options is current; scripts/options_page.py makes it."""

from __future__ import annotations

import contextlib
import re

import options_page
from golden import check_golden
from paths import ROOT

from hpcgpu.cli.commands import plan, run
from hpcgpu.config.layers import read_settings
from hpcgpu.errors import ConfigError
from hpcgpu.model.settings import options, user_name

PAGE = ROOT / "docs/reference/options.md"


def test_the_page_is_current() -> None:
    check_golden(PAGE, options_page.render())


def test_every_option_is_there_with_all_its_names() -> None:
    text = PAGE.read_text()
    for f in options():
        name = user_name(f)
        assert text.count(f"\n- **`{name}`**") == 1
        assert all(f"`{alias}`" in row(name).split(": ")[0] for alias in f.metadata["aliases"])
        assert len(row(name).partition(": ")[2]) > 15
    assert re.search(
        r"^\| hpcgpu run, hpcgpu launch, GPURunner, LocalGPUCluster \| `nodes`, `queue`, ", text, re.MULTILINE
    )
    assert not re.search(r"[.:] (Tls|CuDF|Mpi|Rmm)\b", text)


def test_flags_and_variables_are_as_the_page_says() -> None:
    """The rule for names, in place of a list: hyphens, capitals, and ``--no-`` for what is on or off."""
    flags = {flag for command in (plan, run) for p in command.params for flag in (*p.opts, *p.secondary_opts)}
    for f in options():
        name = user_name(f)
        flag = name.replace("_", "-")
        assert {f"--{flag}", *([f"--no-{flag}"] if f.metadata["kind"] == "flag" else [])} <= flags
        value = {"flag": "true", "port": "1"}.get(f.metadata["kind"], "nonsense of a test")
        with contextlib.suppress(ConfigError):
            assert read_settings({}, environ={f"HPCGPU_{name.upper()}": value}).where(name) == f"HPCGPU_{name.upper()}"


def row(name: str) -> str:
    return next(line for line in PAGE.read_text().splitlines() if line.startswith(f"- **`{name}`**"))
