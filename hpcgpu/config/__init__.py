"""Settings from text, and the run document: one value by its option's kind, and all settings as one line of JSON.

The document fits one variable of the environment. Every leader reads it, and every rank its part, so nothing is
imported here but json: a validator such as msgspec costs 10 to 30 ms of CPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hpcgpu.errors import ConfigError
from hpcgpu.model import settings
from hpcgpu.model.allocation import DOCUMENT, WRITTEN, parse_simulated
from hpcgpu.model.job import VERSION, RunDocument
from hpcgpu.model.settings import NIC_RULES, Limit, Settings, one_line, options, plain_number, user_name
from hpcgpu.units import DURATIONS, format_bytes, meant, parse_duration_s

if TYPE_CHECKING:
    from hpcgpu.model.site import Site


VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A value without '=', a comma, and what looks like another variable: not KMP_AFFINITY=verbose,granularity=fine, nor
# GODEBUG=a=1,B=2.
_TWO_VARIABLES = re.compile(r"(\s*[A-Za-z_][A-Za-z0-9_]*\s*)=([^=]*?),(\s*[A-Z_][A-Z0-9_]*=.*)")
_SMALLEST_NODE_BYTES = 1 << 20  # as a node's memory; no Python starts in less
CORES = ("all", "local")
_LOOPBACK = ("", "localhost", "127.0.0.1", "[::1]")
_HIGHEST_PORT = (1 << 16) - 1


def read_value(option: Field[Any], value: object, where: str) -> Any:  # the option's own type
    """Read an option's value, a Python value or text, as Settings holds it; ConfigError, with ``where``, for others."""
    read, _ = KINDS[option.metadata["kind"]]
    return settings.read_option(user_name(option), value, where, lambda plain: read(option, plain))


def nearest(word: str, names: Iterable[str]) -> str:
    """Return a hint for an unknown word: the nearest known word, or all of them."""
    from difflib import get_close_matches

    options = sorted(names)
    close = get_close_matches(word, options, n=1)
    return f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(options)}"


def option_of(directive: str) -> str:
    """Parse a directive's option: ``--constraint`` of ``--constraint=gpu``, ``-l mem`` of ``-l mem=1gb``."""
    words = directive.partition("=")[0].split()
    return " ".join(words[: 2 if words[:1] == ["-l"] else 1])


def _whole(value: object, noun: str, least: int, allowed: str = "") -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{value!r} is not a {noun}; allowed: {allowed}a whole number from {least}")
    return value


def _port(option: Field[Any], value: object) -> int:
    """Read a port; Dask's address of a dashboard has a colon before it."""
    host, _, number = str(value).strip().rpartition(":")
    if host and "dashboard_address" not in option.metadata["aliases"]:
        number = ""
    elif host not in _LOOPBACK:
        raise ConfigError(
            f"{value!r} is not on loopback; elsewhere other users could reach the dashboard; give the port alone, such "
            "as ':8787'; ssh -L forwards it to another machine"
        )
    if isinstance(value, bool) or not number.isascii() or not number.isdecimal() or int(number) > _HIGHEST_PORT:
        raise ConfigError(f"{value!r} is not a port; allowed: 1 to {_HIGHEST_PORT}, or 0 for a free one")
    return int(number)


def _cores(_: Field[Any], value: object) -> str | int:
    words = "'all' (equal shares), 'local' (the cores on the GPU's NUMA node), or for each worker "
    return str(value) if value in CORES else _whole(value, "number of cores", 1, words)


def _nics(option: Field[Any], value: object) -> str | tuple[str, ...]:
    """Read a rule, or names of ports. A text with commas is a list."""
    texts = _texts(option, value)
    names = tuple(part.strip() for text in texts for part in text.split(",") if part.strip())
    if len(names) == 1 and names[0] in NIC_RULES:
        return names[0]
    if not names or (rules := sorted(set(names) & set(NIC_RULES))):
        problem = f"{rules[0]!r} is a rule and stands alone" if names else f"{value!r} has no name"
        raise ConfigError(f"{problem}; allowed: {', '.join(map(repr, NIC_RULES))}, or names such as 'mlx5_0,mlx5_1:2'")
    return names


def _node_bytes(_: Field[Any], value: object) -> int:
    """Read the size of a node's memory. A number is bytes, as everywhere; sbatch's would be MiB."""
    size = settings.read_size(value, "allowed: bytes as a number, or text such as '5GB', '512MiB'")
    if size < _SMALLEST_NODE_BYTES:
        raise ConfigError(
            f"{value!r} is {format_bytes(size)}{meant(value)}; allowed: a size from 1 MiB such as '5GB'; without "
            "memory= the site's default counts"
        )
    return size


def _duration(_: Field[Any], value: object) -> int:
    if not isinstance(value, str) or plain_number(value) is not None:
        raise ConfigError(f"{value!r} is not a duration: it has no unit; allowed: {DURATIONS}; in YAML with quotes")
    return parse_duration_s(value)


def _seconds(_: Field[Any], value: object) -> float:
    number = plain_number(value)
    if number is None and isinstance(value, str):
        number = float(parse_duration_s(value))
    if number is None or number < 0:
        raise ConfigError(f"{value!r} is not a time; allowed: seconds from 0, or text such as '30s', '2m'")
    return number


def _gpus(_: Field[Any], value: object) -> str:
    """Read simulated GPUs, or the number of all GPUs: digits, which ``config.sites.jobs`` makes nodes of."""
    if plain_number(value) is not None and not isinstance(value, bool) and str(value).strip().isdecimal():
        return str(_whole(value, "number of GPUs", 1))
    if not isinstance(value, str) or re.fullmatch(r"[\d\s,]*", value):
        raise ConfigError(
            f"{value!r} is not a number of GPUs: give gpus_per_node=4; gpus= is the total at a known site, gpus=8, or "
            "simulated GPUs of each node, 'sim:4' or 'sim:4x256MiB' (as simulate=)"
        )
    parse_simulated(value)
    return value


def _simulate(_: Field[Any], value: object) -> str:
    text = str(value).strip() if isinstance(value, (int, str)) and not isinstance(value, bool) else repr(value)
    parse_simulated(text, "")
    return text


def _choice(option: Field[Any], value: object) -> str:
    value = "ucx" if value == "ucxx" else value  # dask-cuda's and distributed's name of a protocol
    if value in (choices := option.metadata["choices"]):
        return str(value)
    raise ConfigError(f"{value!r} is not a choice; allowed: {', '.join(choices)}")


def _texts(option: Field[Any], value: object) -> tuple[str, ...]:
    """Read texts; of shell lines a text of several lines is several, and empty lines go."""
    entries = _parts(value)
    if not isinstance(entries, Iterable) or isinstance(entries, (str, Mapping, bytes)):
        raise ConfigError(f"{value!r} is not a list; allowed: a list of texts, or one text")
    texts = tuple(entries)
    if wrong := [e for e in texts if not isinstance(e, str)]:
        raise ConfigError(f"{wrong[0]!r} is not text; allowed: a list of texts of one line each")
    if option.metadata["kind"] == "lines":
        texts = tuple(line for e in texts for line in e.replace("\r\n", "\n").split("\n") if line.strip())
    return tuple(map(one_line, texts))


def _parts(value: object) -> object:
    """Return a text as a list of one, or the JSON list or object in it (environment variables)."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if not text.startswith(("[", "{")):
        return [value] if text else []
    try:
        return json.loads(text)
    except ValueError:
        return [value]  # a shell line such as "{ module load cuda; }" or "[ -f x ] && . x"


def _flag(option: Field[Any], value: object) -> bool:
    if option.name == "security" and hasattr(value, "get_connection_args"):  # distributed's, without its import
        raise ConfigError(
            "a Security object is not accepted: each cluster makes its own certificate, which Client(cluster) uses; "
            "leave security out (TLS is on), or give security=False (TLS is off)"
        )
    return settings.read_flag(value)


def _pairs(value: object, allowed: str, split: Callable[[str], Iterable[str]]) -> Mapping[Any, Any]:
    """Return a mapping, also from texts, each in JSON, or of what ``split`` makes ``NAME=VALUE``."""
    entries = _parts(value)
    if isinstance(entries, Mapping):
        return entries
    if not isinstance(entries, Iterable) or isinstance(entries, (str, bytes)):
        raise ConfigError(f"{value!r} is not a mapping; {allowed}")
    pairs: dict[Any, Any] = {}
    for entry in entries:
        if isinstance(plain := _parts(entry), Mapping):
            pairs |= plain
            continue
        for text in split(entry) if isinstance(entry, str) else [str(entry)]:
            name, equals, text_value = text.partition("=")
            if not equals:
                raise ConfigError(f"{text!r} has no '='; {allowed}")
            pairs[name.strip()] = text_value
    return pairs


def _one_variable(text: str) -> Iterator[str]:
    """Yield the text itself: the value of a variable may have commas."""
    if two := _TWO_VARIABLES.fullmatch(text):
        name, value, second = two.groups()
        as_json = json.dumps({name.strip(): f"{value},{second}"})
        raise ConfigError(
            f"{text!r} looks like two variables; give each by itself: '{name}={value}' and '{second.strip()}'; for one "
            f"variable with this value: {as_json}"
        )
    yield text


def _numbers(_: Field[Any], value: object) -> Mapping[str, float]:
    allowed = "allowed: {'GPU': 1}, or as text GPU=1, each by itself or with commas"
    numbers: dict[str, float] = {}
    for name, text_value in _pairs(value, allowed, lambda text: filter(None, re.split(r"[,\s]+", text))).items():
        number = plain_number(text_value)
        if not isinstance(name, str) or number is None or number < 0:
            raise ConfigError(f"{name!r}: {text_value!r} is not a number from 0; {allowed}")
        numbers[one_line(name, "name")] = number
    return MappingProxyType(numbers)


def _environment(_: Field[Any], value: object) -> Mapping[str, str]:
    variables: dict[str, str] = {}
    allowed = "allowed: {'NAME': 'value'}, or as text NAME=value, each by itself"
    for name, raw in _pairs(value, allowed, _one_variable).items():
        if not isinstance(name, str) or not VARIABLE.fullmatch(name):
            raise ConfigError(f"{name!r} is not a variable's name; allowed: letters, digits and _, no digit first")
        text = str(raw) if isinstance(raw, (int, float)) and not isinstance(raw, bool) else raw
        if not isinstance(text, str) or settings.MARKS.search(text):
            raise ConfigError(f"{name}: {raw!r} is not allowed; allowed: text without newline or control character")
        variables[name] = text
    return MappingProxyType(variables)


_LIMIT = "float, int or str"
# The reader of each kind of option, and its types as numpydoc shows them; a choice has its values instead.
KINDS: Mapping[str, tuple[Callable[[Field[Any], object], Any], str]] = {
    "count": (lambda _, value: _whole(value, "count", 1), "int"),
    "port": (_port, "int or str"),
    "number": (lambda _, value: _whole(value, "number", 0), "int"),
    "cores": (_cores, "str or int"),
    "nics": (_nics, "str or list of str"),
    "bytes": (_node_bytes, "int or str"),
    "duration": (_duration, "str"),
    "seconds": (_seconds, "float or str"),
    "limit": (lambda _, value: settings.read_limit(value), _LIMIT),
    "device-limit": (lambda _, value: settings.read_device_limit(value), _LIMIT),
    "host-limit": (lambda _, value: settings.read_host_limit(value), _LIMIT),
    "gpus": (_gpus, "int or str"),
    "simulate": (_simulate, "int or str"),
    "choice": (_choice, ""),
    "text": (lambda _, value: settings.read_text(value), "str"),
    **dict.fromkeys(("texts", "lines"), (_texts, "list of str")),
    "flag": (_flag, "bool"),
    "numbers": (_numbers, "dict of str to float"),
    "environment": (_environment, "dict of str to str"),
}


LIBRARIES = ("cupy", "torch")  # RMM has an allocator for these and for numba (rmm.allocators, 26.10)


def check_settings(settings: Settings, site: Site | None = None) -> None:
    """Raise ConfigError, with values and sources, if settings contradict each other or do not fit the site's nodes."""
    if len(argv := (settings.python or "").split()) > 1 and "/" not in argv[0]:
        raise ConfigError(f"{settings.cite('python')}: one program is allowed, without options; launcher= starts it")
    _check_network(settings, site)
    _check_gpus(settings, site)
    _check_rapids(settings)


def _check_network(settings: Settings, site: Site | None) -> None:
    both = f"{settings.cite('protocol')} with {settings.cite('security')}"
    if settings.protocol == "ucx" and settings.security:
        raise ConfigError(f"{both}: UCX cannot encrypt; leave security out and accept it, or use protocol='tls'")
    if settings.protocol == "tls" and settings.security is False:
        raise ConfigError(f"{both}: leave one of the two out; without TLS it is protocol='tcp'")
    if settings.protocol == "tcp" and settings.security:
        raise ConfigError(f"{both}: tcp is not encrypted; leave protocol out, or use protocol='tls'")
    if settings.protocol == "ucx" and "rendezvous" in settings.sources and settings.rendezvous == "mpi":
        raise ConfigError(
            f"{settings.cite('rendezvous')} with {settings.cite('protocol')}: MPI brings a UCX of its own into the "
            "process, with which the other does not work; leave rendezvous out: the ranks meet by files then"
        )
    if settings.protocol == "ucx" and site is not None and site.network.ucx is False:
        cited = site.cited(site.network, "ucx")
        raise ConfigError(
            f"{settings.cite('protocol')} on {site.name}: UCX has no transport for this site's network "
            f"({cited}); leave protocol out, which gives tls on the nearest interface"
        )


def _check_gpus(settings: Settings, site: Site | None) -> None:
    per_node = settings.gpus_per_node
    if per_node is None:
        return
    if settings.gpus is not None:
        if (count := parse_simulated(settings.gpus).per_node) != per_node:
            raise ConfigError(
                f"{settings.cite('gpus_per_node')}, but {settings.cite('gpus')} simulates {count} on each node; leave "
                "gpus_per_node out"
            )
    elif site is not None and (node := site.node(settings.queue)) and per_node > node.gpus and settings.site_limits:
        cited = site.cited(node, "gpus")
        raise ConfigError(
            f"{settings.cite('gpus_per_node')}, but a node of {site.name} has {node.gpus} ({cited}); allowed: 1 to "
            f"{node.gpus}; more GPUs by nodes="
        )


def _check_rapids(settings: Settings) -> None:
    cite = settings.cite
    if settings.rmm_async and settings.rmm_managed_memory:
        raise ConfigError(
            f"{cite('rmm_async')} with {cite('rmm_managed_memory')}: CUDA's asynchronous allocator gives no managed "
            "memory; leave one of the two out"
        )
    if settings.rmm_release_threshold and not settings.rmm_async:
        raise ConfigError(f"{cite('rmm_release_threshold')} is for rmm_async=True only; give it too, or leave it out")
    if settings.rmm_maximum_pool_size and not (settings.rmm_pool_size or settings.rmm_async):
        raise ConfigError(
            f"{cite('rmm_maximum_pool_size')} without a pool; give rmm_pool_size or rmm_async=True too, or leave it out"
        )
    pool, most = settings.rmm_pool_size, settings.rmm_maximum_pool_size
    # A fraction and bytes are compared later, when the GPU's size is known.
    if pool and most and pool.is_part == most.is_part and float(most.value) < float(pool.value):
        raise ConfigError(
            f"{cite('rmm_maximum_pool_size')} is less than {cite('rmm_pool_size')}; allowed: as much, or more"
        )
    if unknown := [name for name in settings.rmm_libraries if name not in LIBRARIES]:
        raise ConfigError(
            f"{cite('rmm_allocator_external_lib_list')}: RMM has no allocator for {unknown[0]!r}; "
            f"allowed: {', '.join(LIBRARIES)}"
        )
    if settings.cudf_spill_stats and not settings.enable_cudf_spill:
        raise ConfigError(f"{cite('cudf_spill_stats')} without enable_cudf_spill=True; give both, or neither")


SHAPES = ("gang", "in-allocation", "head", "member")
# Linux refuses a variable above 128 KiB, with its name (MAX_ARG_STRLEN, execve(2)).
LONGEST = 131_071 - len(f"{DOCUMENT}=")


def render_document(document: RunDocument) -> str:
    """Render a run document, the settings that are not defaults, as one ASCII line; ConfigError if it is too long."""
    defaults = Settings()
    settings: dict[str, Any] = {}
    for option in options():
        value = getattr(document.settings, option.name)
        if value != getattr(defaults, option.name) or (option.name in WRITTEN and value is not None):
            settings[option.name] = _plain(value)
    whole = {
        **{f.name: getattr(document, f.name) for f in fields(RunDocument)},
        "settings": settings,
        "sources": dict(document.settings.sources),
    }
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"), allow_nan=False)
    text = text.replace("\x7f", "\\u007f")  # the only control character that json does not escape
    if len(text) > LONGEST:
        raise ConfigError(
            f"the run document has {len(text)} characters, and a variable of the environment at most {LONGEST}: "
            "shorten env, job_script_prologue or the script's arguments (put them into a file)"
        )
    return text


def read_document(text: str) -> RunDocument:
    """Parse a run document: the inverse of :func:`render_document`; ConfigError for other text, version or values."""
    try:
        raw = json.loads(text)
        version = raw["version"]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"not a run document (it is made by hpcgpu, not by hand): {error}: {text[:80]!r}") from error
    if type(version) is not int or version != VERSION:
        raise ConfigError(
            f"run document of version {version!r}, but this hpcgpu reads version {VERSION}: the hpcgpu that "
            "made it and the one on this node differ; install the same on both, or make the job script anew"
        )
    expected = {f.name for f in fields(RunDocument)} | {"sources"}
    if set(raw) != expected:
        raise ConfigError(f"run document with keys {sorted(raw)}; expected {sorted(expected)}")
    _check("shape", raw["shape"], raw["shape"] in SHAPES, f"one of {', '.join(SHAPES)}")
    for name, value in raw.items():
        kind = {"version": int, "script": list, "settings": dict, "sources": dict}.get(name, str)
        _check(name, value, isinstance(value, kind), f"a {kind.__name__}")
    sources, script = raw["sources"], raw["script"]
    for name, texts in (("sources", sources.values()), ("script", script)):
        _check(name, raw[name], all(isinstance(text, str) for text in texts), "texts")
    by_name = {option.name: option for option in options()}
    values: dict[str, Any] = {}
    for name, value in raw["settings"].items():
        _check("settings", name, name in by_name, "names of settings")
        text = f"{value}s" if by_name[name].metadata["kind"] == "duration" else value
        values[name] = read_value(by_name[name], text, "the run document")
        _check(f"settings.{name}", value, _plain(values[name]) == value, "what hpcgpu writes")  # not "2" for 2
    settings = Settings(**values, sources=MappingProxyType(sources))
    return RunDocument(settings, raw["shape"], tuple(script), raw["folder"], raw["launch"], raw["exit_file"])


def _plain(value: object) -> object:
    """Convert a setting's value to JSON's types."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Limit):
        return value.value
    return list(value) if isinstance(value, tuple) else value


def _check(path: str, value: object, right: bool, allowed: str) -> None:
    if not right:
        raise ConfigError(f"run document: {path}: {value!r}; allowed: {allowed}")
