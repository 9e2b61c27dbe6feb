"""Check a job against its site's rules before a submission: the rule, its source, and the advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hpcgpu.config.values import option_of
from hpcgpu.errors import ConfigError
from hpcgpu.model.settings import Settings, options, user_name
from hpcgpu.units import format_duration

if TYPE_CHECKING:
    from hpcgpu.model.site import Site

NEVERTHELESS = (
    "sites change: site_limits=False submits it nevertheless, and site= also takes the path of a file of your own"
)


def check_submission(settings: Settings, site: Site | None, *, member: bool = False) -> None:
    """Raise ConfigError, with rules and sources, if the site would refuse the job; ``member``: a job of one node."""
    if site is None:
        return
    _check_required(settings, site)
    checked = replace(settings, nodes=1) if member else settings
    violations = tuple(beyond(checked, site)) if settings.site_limits else ()
    if violations:
        raise ConfigError(f"site {site.name} would refuse this job: {'; '.join(violations)}. {NEVERTHELESS}")


def notes(settings: Settings, site: Site | None) -> tuple[str, ...]:
    """Return messages for users of a site on a job that it accepts."""
    if site is None or settings.scheduler != "here" or not site.login.policy:
        return ()
    cited = site.cited(site.login.source, "login", "policy")
    return (
        f"{settings.cite('scheduler')}: on a login node of {site.name}, {site.login.policy} ({cited}); leave scheduler "
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
        whys = (rule.why for rule in site.rules if rule.require in missing)
        texts = [*filter(None, (site.account.text if "account" in missing else "", *whys))]
        raise ConfigError(
            f"site {site.name} refuses a job without {' and '.join(missing)}: give "
            f"{', '.join(f'{name}=...' for name in missing)} (or HPCGPU_{missing[0].upper()} in the environment)"
            f"{''.join(f'; {text}' for text in texts)} ({_rule_sources(site, missing)})"
        )
    options_given = {option_of(text) for text in settings.job_extra_directives}
    for rule in site.rules:
        if settings.site_limits and rule.require.startswith("-") and option_of(rule.require) not in options_given:
            raise ConfigError(
                f"site {site.name} refuses a job without {rule.require}{f' ({rule.why})' if rule.why else ''}: give "
                f"it in job_extra_directives ({site.cited(rule.source, *site.path_of(rule))}); {NEVERTHELESS}"
            )


def _rule_sources(site: Site, missing: list[str]) -> str:
    cited = [site.cited(rule.source, *site.path_of(rule)) for rule in site.rules if rule.require in missing]
    of_account = (
        [site.cited(site.account.source, "account", "needed")] if "account" in missing and site.account.needed else []
    )
    return "; ".join(dict.fromkeys([*of_account, *cited]))


def beyond(settings: Settings, site: Site) -> Iterator[str]:
    """Yield each limit of the job's queue that the job exceeds, with its source and what to change."""
    queue = site.queue(settings.queue)
    if queue is None:
        return

    names = [other.name for other in site.queues if other.name != queue.name]
    others = f" ({', '.join(names)})" if names else ""

    def change(key: str, options: str) -> str:
        return f" ({site.cited(queue.source, *site.path_of(queue), key)}); change {options} or queue={others}"

    nodes, takes = settings.nodes, f"queue {queue.name} takes"
    if queue.nodes and not queue.nodes[0] <= nodes <= queue.nodes[1]:
        yield f"nodes={nodes}, but {takes} {_range(queue.nodes)} nodes{change('nodes', 'nodes=')}"
    total = nodes * (settings.gpus_per_node or 0)
    if queue.gpus and total and not queue.gpus[0] <= total <= queue.gpus[1]:
        yield f"{total} GPUs, but {takes} {_range(queue.gpus)}{change('gpus', 'gpus=, nodes=')}"
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
            f"the jobs that come and go with shape='elastic' have one node, but {takes} {queue.nodes[0]} at least"
            f"{change('nodes', 'shape=')}"
        )


def _range(limits: tuple[int, int]) -> str:
    return str(limits[0]) if limits[0] == limits[1] else f"{limits[0]} to {limits[1]}"
