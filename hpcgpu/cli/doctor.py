"""``hpcgpu doctor``: find what keeps workers from connecting, or makes them slow."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hpcgpu.cli.command import FROM, Command, debug_option, json_option, setting_options, show, typed_settings
from hpcgpu.report import Column, Table

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "not looked at": "cyan"}
_COLUMNS = (
    *(Column("name", kind="name"), Column("verdict", kind="name", styles=_COLOURS), Column("seen", kind="prose")),
    Column("advice", kind="note", mark="-> "),
)


@click.command(
    short_help="Say what keeps workers away, or makes them slow.",
    cls=Command,
    examples={
        "hpcgpu doctor": "this login node",
        "hpcgpu doctor --submit --gpus-per-node 4 --queue gpu": "and two nodes, in a job of a minute",
    },
)
@click.option(
    "--batch", type=click.Choice(["slurm", "pbs"]), help="Batch system; by default the site's, or this machine's."
)
@click.option("--submit", is_flag=True, help="Submit a job of two nodes for a minute, and check them, too.")
@json_option("the findings")
@click.option("--on-nodes", "on_nodes", hidden=True, help="In the job: start the doctor on each node.")
@click.option("--on-node", "on_node", hidden=True, help="In the job: check this node.")
@setting_options("hpcgpu doctor")
@debug_option
def doctor(
    batch: str | None, submit: bool, as_json: bool, on_nodes: str | None, on_node: str | None, **arguments: object
) -> int:
    """Say what keeps workers from connecting, or makes them slow: each line ok, warning, failed or not looked at.

    The options are those of the job that does not do well. The exit code is 1 if something failed, else 0.
    """
    if on_nodes or on_node:
        from hpcgpu.deploy.doctor import node

        return node.on_nodes(Path(on_nodes)) if on_nodes else node.on_node(Path(on_node or ""))
    from hpcgpu.deploy.doctor import job as doctor_job
    from hpcgpu.deploy.doctor import login
    from hpcgpu.host import log
    from hpcgpu.plan.doctor import CheckResult, examine, exit_code
    from hpcgpu.plan.doctor.login import LOGIN_CHECKS, confirmed

    job, no_job = login.read(typed_settings(arguments), FROM, batch, must=submit)
    doctor_job.clean_up(log.say)
    facts, job_findings = login.facts(job, no_job), tuple[CheckResult, ...]()
    if submit and job:
        job_findings, job_facts = doctor_job.run(job, log.say)
        facts = confirmed(facts, job_facts) if job_facts else facts
    findings = (*examine(LOGIN_CHECKS, facts), *job_findings)
    table = Table(_COLUMNS, [(f.name, f.verdict.value, f.seen, f.advice) for f in findings])
    if as_json:
        click.echo(json.dumps({"exit_code": exit_code(findings), "findings": table.to_json()}, indent=2))
    else:
        show(table)
    return exit_code(findings)
