"""Site files: the needs of one machine, in YAML with a strict schema.

Schema version 1, in the file ``site_configs/<name>.yaml``: ``version``, ``name``, ``batch`` (``slurm`` or
``pbs``), ``dialect``, ``defaults`` (settings, by the users' names), ``required`` (settings that the site
refuses a job without), ``gpus_per_node``, ``ucx`` (has it a transport for the site's network), ``notes``.

``dialect`` holds keyword fields of the batch system's class:

- Slurm: ``gpus`` (``gpus-per-node``, ``gres`` or ``none``), ``gpu_type`` (text), ``memory`` (may ``--mem``
  be given), ``cpus`` (may ``--cpus-per-task`` be given), ``array_limit`` (the most elements of an array).
- PBS: ``gpus`` (the chunk's resource: ``ngpus``, ``gpus`` or ``none``), ``mpiprocs`` (may it be given),
  ``place`` (text), ``resources`` (text added to the chunk), ``launcher`` (argv words that start the ranks),
  ``array_limit``, ``select`` (is there ``-l select``; else totals are asked for), ``cpus_multiple_of`` (of the
  cores of each GPU), ``direct_output`` (may ``-k doe`` be given).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
import yaml

from hpcgpu.config.layers import read_given
from hpcgpu.config.values import nearest
from hpcgpu.errors import ConfigError
from hpcgpu.model.settings import options, user_name
from hpcgpu.model.site import Site

T = TypeVar("T", bound=msgspec.Struct)
Word = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f]+$")]
Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]*$")]


class SlurmDialect(msgspec.Struct, forbid_unknown_fields=True):
    """How a Slurm site is asked for GPUs, memory and cores."""

    gpus: Literal["gpus-per-node", "gres", "none"] | msgspec.UnsetType = msgspec.UNSET
    gpu_type: Word | msgspec.UnsetType = msgspec.UNSET
    memory: bool | msgspec.UnsetType = msgspec.UNSET
    cpus: bool | msgspec.UnsetType = msgspec.UNSET
    array_limit: Annotated[int, msgspec.Meta(ge=1)] | msgspec.UnsetType = msgspec.UNSET


class PbsDialect(msgspec.Struct, forbid_unknown_fields=True):
    """How a PBS site is asked for GPUs, ranks and placement."""

    gpus: Literal["ngpus", "gpus", "none"] | msgspec.UnsetType = msgspec.UNSET
    mpiprocs: bool | msgspec.UnsetType = msgspec.UNSET
    place: Word | msgspec.UnsetType = msgspec.UNSET
    resources: Word | msgspec.UnsetType = msgspec.UNSET
    launcher: tuple[Word, ...] | msgspec.UnsetType = msgspec.UNSET
    array_limit: Annotated[int, msgspec.Meta(ge=1)] | msgspec.UnsetType = msgspec.UNSET
    select: bool | msgspec.UnsetType = msgspec.UNSET
    cpus_multiple_of: Annotated[int, msgspec.Meta(ge=1)] | msgspec.UnsetType = msgspec.UNSET
    direct_output: bool | msgspec.UnsetType = msgspec.UNSET


class SiteFile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The schema of the YAML document."""

    version: Literal[1]
    name: Name
    batch: Literal["slurm", "pbs"]
    dialect: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    required: tuple[str, ...] = ()
    gpus_per_node: Annotated[int, msgspec.Meta(ge=1)] | None = None
    ucx: bool = True
    notes: tuple[str, ...] = ()


DIALECTS: Mapping[str, type[msgspec.Struct]] = MappingProxyType({"slurm": SlurmDialect, "pbs": PbsDialect})


class _Loader(yaml.SafeLoader):
    """YAML's safe loader. It refuses duplicate keys, of which plain YAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := next((k for k in keys if keys.count(k) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_site(text: str, name: str) -> Site:
    """Return the site that a YAML text describes.

    Parameters
    ----------
    text : str
        The file.
    name : str
        The file's name in messages, such as ``site_configs/perlmutter.yaml``.

    Raises
    ------
    ConfigError
        Not YAML, or not the schema; the message has the path to the value.

    """
    try:
        raw = yaml.load(text, Loader=_Loader)  # a safe loader
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{name}: a site file is a mapping with at least version, name and batch")
    if raw.get("version") != 1:
        raise ConfigError(f"{name}: version: {raw.get('version')!r} is given; this hpcgpu reads version 1")
    file = _convert(raw, SiteFile, name)
    dialect = _convert(file.dialect, DIALECTS[file.batch], name, "dialect")
    known = {user_name(f) for f in options()} - {"site"}
    for entry in (*file.required, *(["site"] if "site" in file.defaults else [])):
        if entry not in known:
            raise ConfigError(f"{name}: {entry!r} is no setting that a site can have; {nearest(entry, known)}")
    read_given(file.defaults, lambda key: f"{name}: defaults.{key}")
    return Site(
        name=file.name,
        batch=file.batch,
        dialect=MappingProxyType(
            {k: v for k in dialect.__struct_fields__ if (v := getattr(dialect, k)) is not msgspec.UNSET}
        ),
        defaults=MappingProxyType(file.defaults),
        required=file.required,
        gpus_per_node=file.gpus_per_node,
        ucx=file.ucx,
        notes=file.notes,
    )


def _convert(raw: object, kind: type[T], name: str, under: str = "") -> T:
    fields = kind.__struct_fields__
    unknown = next((k for k in raw if k not in fields), None) if isinstance(raw, dict) else None
    if unknown is not None:
        path = f"{under}.{unknown}" if under else str(unknown)
        raise ConfigError(f"{name}: {path}: no such key; {nearest(str(unknown), fields)}")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `$")
        where = ".".join(filter(None, (under, path.rstrip("`").lstrip("."))))
        words = _words(kind, path.rstrip("`").lstrip("."))
        allowed = f"; allowed: {', '.join(words)}" if words else ""
        raise ConfigError(f"{name}: {where + ': ' if where else ''}{said}{allowed}") from error


def _words(kind: type[msgspec.Struct], field: str) -> tuple[str, ...]:
    """Return the words of which a field takes one; none if it takes something else."""
    hint = get_type_hints(kind).get(field)
    return tuple(word for part in (hint, *get_args(hint)) for word in get_args(part) if isinstance(word, str))
