"""Replace words that identify people or machines in texts: names, paths, addresses and serial numbers.

One word becomes the same neutral word wherever it stands, so related places remain related. Neutral addresses are those
that RFC 5737, RFC 3849 and RFC 7042 keep for documents; identifiers keep their form: parsers read them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping

_HEX = "[0-9a-fA-F]"
_PEM = re.compile(r"-----BEGIN [^-]+-----.*?(?:-----END [^-]+-----|\Z)", re.S)
# In hwloc's XML: HostName, DMIProductSerial, NVIDIAUUID, NodeGUID, Port1GID0, Address ...
_INFO = re.compile(
    r'(<info name="[^"]*(?:Serial|UUID|GUID|GID|AssetTag|HostName|Address|LinkUID)[^"]*" value=")([^"]*)(")'
)
_UUID = re.compile(rf"\b{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}\b")
_GUID = re.compile(rf"(?<![\w:])(?:0x)?(?:{_HEX}{{4}}:){{3,7}}{_HEX}{{4}}(?![\w:])")
_MAC = re.compile(rf"(?<![\w:])(?:{_HEX}{{2}}[:-]){{5,19}}{_HEX}{{2}}(?![\w:])")
_IPV4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w]|\.\d)")
_IPV6 = re.compile(rf"(?<![\w:.])(?:{_HEX}{{0,4}}:){{2,7}}{_HEX}{{0,4}}(?![\w:])")
# A variable or key with a secret's name, and its value: NAME=value, "name": "value", ["NAME", "value"].
_NAMED = re.compile(
    r"""(?i)([\w-]*(?:token|secret|passw(?:or)?d|credential|api_?key|private_?key)[\w-]*\\?["']?\s*[=:,]\s*\\?["']?)"""
    r"""([^\s"'\\,;]+)"""
)
_MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
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
        self._counts: dict[str, int] = {}
        longest_first = sorted(self._kinds, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(_pattern, longest_first))) if longest_first else None

    def scrub(self, text: str) -> str:
        """Remove the words, and whatever looks like an address, an identifier or a key."""
        text = _PEM.sub("(a key or certificate was here)", text)
        text = _NAMED.sub(lambda m: f"{m[1]}(secret)", text)
        text = _INFO.sub(lambda m: f"{m[1]}{self._value(m[2])}{m[3]}", text)
        for pattern, replace in self._patterns():
            text = pattern.sub(lambda m, replace=replace: replace(m[0]), text)  # type: ignore[misc]
        return self._neutralized(text)

    def _patterns(self) -> tuple[tuple[re.Pattern[str], Callable[[str], str]], ...]:
        return (
            (_MAIL, lambda word: self._numbered(word, "mail", "person{}@example.org")),
            (_UUID, lambda word: self._numbered(word, "uuid", "00000000-0000-4000-8000-{:012x}")),
            (_GUID, self._guid),
            (_MAC, self._mac),
            (_IPV4, self._address),
            (_IPV6, self._address),
        )

    def _neutralized(self, text: str) -> str:
        """Replace the words; if replacing forms new ones, repeat, and remove the rest in the end."""
        if self._pattern is None:
            return text
        for _ in range(_ROUNDS):
            if not self._pattern.search(text):
                return text
            text = self._pattern.sub(lambda m: self._word(m[0]), text)
        while self._pattern.search(text):
            text = self._pattern.sub("", text)
        return text

    def _word(self, word: str) -> str:
        if word not in self._neutral:
            kind = self._kinds[word]
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
            candidates = (f"{kind}{number}", f"({number})", "")
            pattern = self._pattern
            self._neutral[word] = next(c for c in candidates if pattern is None or not pattern.search(c))
        return self._neutral[word]

    def _numbered(self, word: str, kind: str, form: str) -> str:
        """Return the neutral identifier for a word; a neutral identifier is returned unchanged."""
        if word in self._neutral.values():
            return word
        if word not in self._neutral:
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
            self._neutral[word] = form.format(number)
        return self._neutral[word]

    def _value(self, value: str) -> str:
        """Return the neutral word for a value whose name alone shows that it identifies something."""
        if value in self._kinds:
            return self._word(value)
        if not value.strip("0:. ") or any(p.search(value) for p, _ in self._patterns()):
            return value  # empty, or replaced by its form
        return self._numbered(value, "value", "value{}")

    def _guid(self, word: str) -> str:
        groups = word.removeprefix("0x").count(":")
        return self._numbered(word, f"guid{groups}", "0000:" * groups + "{:04x}") if word.strip("0x:") else word

    def _mac(self, word: str) -> str:
        pairs = word.count(":") + word.count("-")
        return (
            self._numbered(word, f"mac{pairs}", "02:" + "00:" * (pairs - 1) + "{:02x}") if word.strip("0:-") else word
        )

    def _address(self, word: str) -> str:
        try:
            address = ipaddress.ip_address(word)
        except ValueError:
            return word
        if address.is_loopback or address.is_unspecified or int(address) in (0, 2**32 - 1):
            return word
        return self._numbered(word, f"ip{address.version}", "192.0.2.{}" if address.version == 4 else "2001:db8::{:x}")


def _pattern(word: str) -> str:
    escaped = re.escape(word)
    return escaped if len(word) >= _SHORT else rf"(?<![0-9A-Za-z]){escaped}(?![0-9A-Za-z])"
