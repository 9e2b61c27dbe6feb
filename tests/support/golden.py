"""Files of expected text, which ``pytest --update-golden`` writes anew."""

import os
from pathlib import Path


def check_golden(path: Path, text: str) -> None:
    """Fail if the file has another text; read the difference before you commit a file that was written anew."""
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; if it should, --update-golden and read the diff"
