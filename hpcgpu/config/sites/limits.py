"""Check a job against its site's rules before a submission: the rule, its source, and the advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hpcgpu.config.directives import option_of
from hpcgpu.errors import ConfigError
from hpcgpu.model.settings import Settings, options, user_name
from hpcgpu.units import format_duration

if TYPE_CHECKING:
    from hpcgpu.model.site import Site
    from hpcgpu.model.site_facts import Queue

NEVERTHELESS = (
    "sites change: site_limits=False submits it nevertheless, and site= also takes the path of a file of your own"
)


def check_submission(settings: Settings, site: Site | None, *, member: bool = False) -> None:
    """Raise ConfigError if a job lacks what the site requires, or is beyond its limits.

    The message has each rule with its source, and the option to change. A ``member`` is a job of an elastic cluster,
    with one node.
    """
    if site is None:
        return
    _check_required(settings, site)
    wanted = replace(settings, nodes=1) if member else settings
    found = tuple(beyond(wanted, site)) if settings.site_limits else ()
    if found:
        raise ConfigError(f"site {site.name} would refuse this job: {'; '.join(found)}. {NEVERTHELESS}")


def notes(settings: Settings, site: Site | None) -> tuple[str, ...]:
    """Return messages for users of a site on a job that it accepts."""
    if site is None or settings.scheduler != "here" or not site.login.policy:
        return ()
    cited = site.cited(site.login.source, "login", "policy")
    return (
        f"{settings.said('scheduler')}: on a login node of {site.name}, {site.login.policy} ({cited}); leave scheduler "
        "out, and it is in the job",
    )


def forbidden(settings: Settings, site: Site) -> Mapping[str, str]:
    """Return the batch system's options that the site refuses, each with a message about its rule."""
    if not settings.site_limits:
        return {}
    return {
        rule.forbid: f"site {site.name} refuses {rule.forbid}{f' ({rule.why})' if rule.why else ''}: "
        f"{site.cited(rule.source, *site.path_of(rule))}. Leave it out; {NEVERTHELESS}"
        for rule in site.rules
        if rule.forbid
    }


def _check_required(settings: Settings, site: Site) -> None:
    by_name = {user_name(f): getattr(settings, f.name) for f in options()}
    missing = [name for name in site.required if by_name[name] in (None, (), "")]
    if missing:
        words = [*filter(None, (site.account.text if "account" in missing else "", *_whys(site, missing)))]
        raise ConfigError(
            f"site {site.name} refuses a job without {' and '.join(missing)}: give "
            f"{', '.join(f'{name}=...' for name in missing)} (or HPCGPU_{missing[0].upper()} in the environment)"
            f"{''.join(f'; {text}' for text in words)} ({_rule_sources(site, missing)})"
        )
    own = {option_of(text) for text in settings.job_extra_directives}
    for rule in site.rules:
        if settings.site_limits and rule.require.startswith("-") and option_of(rule.require) not in own:
            raise ConfigError(
                f"site {site.name} refuses a job without {rule.require}{f' ({rule.why})' if rule.why else ''}: give "
                f"it in job_extra_directives ({site.cited(rule.source, *site.path_of(rule))}); {NEVERTHELESS}"
            )


def _whys(site: Site, missing: list[str]) -> list[str]:
    return [rule.why for rule in site.rules if rule.require in missing]


def _rule_sources(site: Site, missing: list[str]) -> str:
    cited = [site.cited(rule.source, *site.path_of(rule)) for rule in site.rules if rule.require in missing]
    own = [site.cited(site.account.source, "account", "needed")] if "account" in missing and site.account.needed else []
    return "; ".join(dict.fromkeys([*own, *cited]))


def beyond(settings: Settings, site: Site) -> Iterator[str]:
    """Yield each limit of the job's queue that the job exceeds, with its source and what to change."""
    queue = site.queue(settings.queue)
    if queue is None:
        return

    def change(key: str, options: str) -> str:
        cited = site.cited(queue.source, *site.path_of(queue), key)
        return f" ({cited}); change {options} or queue={_others(site, queue)}"

    nodes, said = settings.nodes, f"queue {queue.name} takes"
    if queue.nodes and not queue.nodes[0] <= nodes <= queue.nodes[1]:
        yield f"nodes={nodes}, but {said} {_range(queue.nodes)} nodes{change('nodes', 'nodes=')}"
    total = nodes * (settings.gpus_per_node or 0)
    if queue.gpus and total and not queue.gpus[0] <= total <= queue.gpus[1]:
        yield f"{total} GPUs, but {said} {_range(queue.gpus)}{change('gpus', 'gpus=, nodes=')}"
    longest = queue.walltime_s(nodes)
    if settings.walltime_s and longest is not None and settings.walltime_s > longest:
        of = f" of {nodes} nodes" if queue.walltime_by_nodes else ""
        yield (
            f"walltime={format_duration(settings.walltime_s)}, but jobs{of} in queue {queue.name} have "
            f"{format_duration(longest)} at most{change('walltime', 'walltime=')}"
        )
    most = min((n for n in (queue.jobs_per_user, queue.submitted_per_user) if n), default=None)
    if settings.shape == "elastic" and most == 1:
        yield (
            f"shape='elastic' needs several jobs, but queue {queue.name} has one job of each user at a time"
            f"{change('jobs_per_user', 'shape=')}"
        )
    if settings.shape == "elastic" and queue.nodes and queue.nodes[0] > 1:
        yield (
            f"the jobs that come and go with shape='elastic' have one node, but {said} {queue.nodes[0]} at least"
            f"{change('nodes', 'shape=')}"
        )


def _range(limits: tuple[int, int]) -> str:
    return str(limits[0]) if limits[0] == limits[1] else f"{limits[0]} to {limits[1]}"


def _others(site: Site, queue: Queue) -> str:
    """Return the site's other queues, in brackets."""
    names = [other.name for other in site.queues if other.name != queue.name]
    return f" ({', '.join(names)})" if names else ""
