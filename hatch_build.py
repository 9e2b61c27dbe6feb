"""Metadata that depend on the address of the repository, which only the person who publishes a release knows.

With ``HPCGPU_URL=https://host/owner/hpcgpu`` in the build's environment the package names it, and the README's links
lead there. Without it, links to files of the repository are text: on a package index they would lead nowhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_IMAGE = re.compile(r"!\[([^\]]*)\]\((?!https?:)[^)]+\)\n?")
_PICTURE = re.compile(r'<picture>.*?<img alt="([^"]*)" src="([^"]*)">\n</picture>', re.DOTALL)  # light and dark
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")


class AddressHook(MetadataHookInterface):
    """Sets ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling."""
        url = os.environ.get("HPCGPU_URL", "").rstrip("/")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme(text, url)}
        metadata["urls"] = urls(url)


def readme(text: str, url: str) -> str:
    """Return the README as a package index is to show it."""
    text = _PICTURE.sub(r"![\1](\2)", text)
    if url:
        text = re.sub(r"!\[([^\]]*)\]\((?!https?:)([^)]+)\)", rf"![\1]({url}/raw/HEAD/\2)", text)
        return _LINK.sub(rf"[\1]({url}/blob/HEAD/\2)", text)
    return _LINK.sub(_as_text, _IMAGE.sub("", text))


def _as_text(link: re.Match[str]) -> str:
    name, target = link[1], link[2].partition("#")[0]
    return name if name.strip("`") == target else f"{name} (`{target}`)"


def urls(url: str) -> dict[str, str]:
    """Return the links beside the README."""
    if not url:
        return {}
    return {
        "Homepage": url,
        "Source": url,
        "Issues": f"{url}/issues",
        "Changelog": f"{url}/blob/HEAD/CHANGELOG.md",
        "Documentation": f"{url}/blob/HEAD/docs/index.md",
    }
