"""Photograph pages of the tests' browser, for the documentation."""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from browser import Page  # noqa: E402

# Canvases become images, since Chromium's pictures of canvases that change have odd lines at their left edges.
_STILL = """
(() => {
    const all = root => [...root.querySelectorAll("*")].flatMap(e => [e, ...(e.shadowRoot ? all(e.shadowRoot) : [])]);
    return Promise.all(all(document).filter(e => e.tagName === "CANVAS" && e.width).map(canvas => {
        const image = new Image();
        image.src = canvas.toDataURL();
        image.className = canvas.className;
        canvas.replaceWith(image);
        return image.decode();
    })).then(() => 1);
})()
"""


def take_element(page: Page, path: Path, element: str) -> None:
    """Save a picture of the element that an expression gives; all of it is in the window."""
    rect = page.evaluate(f"(r => [r.x, r.y, r.width, r.height])(({element}).getBoundingClientRect())")
    _capture(page, path, *rect)


def take_whole(page: Page, path: Path, end: str) -> None:
    """Save a picture of the page from its top to the y of an expression, whatever the window shows."""
    page.evaluate(_STILL)
    _capture(page, path, 0, 0, *page.evaluate(f"[document.documentElement.clientWidth, {end}]"))


def _capture(page: Page, path: Path, x: float, y: float, width: float, height: float) -> None:
    """Save a part of the page with 256 colours: a third of the bytes, and no visible difference."""
    clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
    answer = page.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
    image = Image.open(io.BytesIO(base64.b64decode(answer["data"])))
    image.convert("RGB").quantize(256).save(path, optimize=True)
