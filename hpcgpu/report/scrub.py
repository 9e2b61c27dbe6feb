"""Replace words that identify people or machines in texts: names, paths, addresses and serial numbers.

One word becomes the same neutral word wherever it stands, so related places remain related.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Mapping

_HEX = "[0-9a-fA-F]"
_PEM = re.compile(r"-----BEGIN [^-]+-----.*?(?:-----END [^-]+-----|\Z)", re.S)
# In hwloc's XML: HostName, DMIProductSerial, NVIDIAUUID, NodeGUID, Port1GID0, Address ...
_INFO = re.compile(
    r'(<info name="[^"]*(?:Serial|UUID|GUID|GID|AssetTag|HostName|Address|LinkUID)[^"]*" value=")([^"]*)(")'
)
# Forms of identifiers, by the kind that their neutral words have.
_FORMS = {
    "mail": re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"),
    "uuid": re.compile(rf"\b{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}\b"),
    "guid": re.compile(rf"(?<![\w:])(?:0x)?(?:{_HEX}{{4}}:){{3,7}}{_HEX}{{4}}(?![\w:])"),
    "mac": re.compile(rf"(?<![\w:])(?:{_HEX}{{2}}[:-]){{5,19}}{_HEX}{{2}}(?![\w:])"),
    "ip": re.compile(
        rf"(?<![\w.])\d{{1,3}}(?:\.\d{{1,3}}){{3}}(?!\w|\.\d)|(?<![\w:.])(?:{_HEX}{{0,4}}:){{2,7}}{_HEX}{{0,4}}(?![\w:])"
    ),
}
# A variable or key with a secret's name, and its value: NAME=value, "name": "value", ["NAME", "value"].
_NAMED = re.compile(
    r"""(?i)([\w-]*(?:token|secret|passw(?:or)?d|credential|api_?key|private_?key)[\w-]*\\?["']?\s*[=:,]\s*\\?["']?)"""
    r"""([^\s"'\\,;]+)"""
)
# Words that every machine has, which identify nothing.
_COMMON = frozenset({"root", "localhost", "nobody", "user", "users", "home", "none", "tmp"})
_SHORT = 3
_ROUNDS = 5


class Scrubber:
    """Replaces words in texts, the same in all of them.

    ``secrets`` are the words to remove, by kind: ``user``, ``host``, ``path``, ``account``, ``secret`` ... The neutral
    word contains the kind. Words of three characters and more are replaced wherever they stand, shorter ones as whole
    words.
    """

    def __init__(self, secrets: Mapping[str, Iterable[str]]) -> None:
        kinds = [(word, kind) for kind, of_kind in secrets.items() for word in of_kind]
        self._kinds = {word: kind for word, kind in kinds if word.strip() and word.lower() not in _COMMON}
        self._neutral: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        longest_first = sorted(self._kinds, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(_pattern, longest_first)) or "(?!)")  # without words: matches nothing

    def scrub(self, text: str) -> str:
        """Remove the words, and whatever looks like an address, an identifier or a key."""
        text = _PEM.sub("(a key or certificate was here)", text)
        text = _NAMED.sub(lambda m: f"{m[1]}(secret)", text)
        text = _INFO.sub(lambda m: f"{m[1]}{self._value(m[2])}{m[3]}", text)
        text = self._without_forms(text)
        for _ in range(_ROUNDS):  # neutral words may form new ones with what is beside them
            text = self._pattern.sub(lambda m: self._word(m[0], self._kinds[m[0]]), text)
        while self._pattern.search(text):
            text = self._pattern.sub("", text)
        return text

    def _without_forms(self, text: str) -> str:
        for kind, pattern in _FORMS.items():
            text = pattern.sub(lambda m, kind=kind: self._word(m[0], kind) if _identifies(m[0], kind) else m[0], text)  # type: ignore[misc]
        return text

    def _value(self, value: str) -> str:
        """Return the neutral word for a value whose name alone shows that it identifies something."""
        if not value.strip("0:. "):
            return value
        by_form = self._without_forms(value)
        return by_form if by_form != value else self._word(value, self._kinds.get(value, "value"))

    def _word(self, word: str, kind: str) -> str:
        """Return the neutral word for a word; it contains no word to remove."""
        if word not in self._neutral:
            self._counts[kind] += 1
            number = self._counts[kind]
            candidates = (f"{kind}{number}", f"({number})", "")
            self._neutral[word] = next(c for c in candidates if not self._pattern.search(c))
        return self._neutral[word]


def _identifies(word: str, kind: str) -> bool:
    """Return whether a word of an identifier's form identifies something: not 127.0.0.1, a time, or zeros."""
    if kind != "ip":
        return bool(word.strip("0x:-"))
    try:
        address = ipaddress.ip_address(word)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified or int(address) in (0, 2**32 - 1))


def _pattern(word: str) -> str:
    escaped = re.escape(word)
    return escaped if len(word) >= _SHORT else rf"(?<![0-9A-Za-z]){escaped}(?![0-9A-Za-z])"
