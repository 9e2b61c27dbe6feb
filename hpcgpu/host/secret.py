"""A secret that only this user's processes have, on all nodes with this home."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from hpcgpu.errors import HpcGpuError
from hpcgpu.host import private


def user_secret() -> str:
    """Return the secret in ``~/.hpcgpu/user/secret``, made once; HpcGpuError if it cannot stay private."""
    try:
        path = private.make_folder(Path.home() / ".hpcgpu" / "user") / "secret"
        if not path.exists():
            part = path.with_name(f"secret-{secrets.token_hex(8)}")
            private.write(part, secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.link(part, path)
            part.unlink()
        return private.read(path)
    except (OSError, RuntimeError) as e:  # RuntimeError: no home is known
        raise HpcGpuError(
            f"a secret of yours cannot be kept in ~/.hpcgpu/user: {e}; HOME must be a folder of yours"
        ) from e


def hidden_name(*parts: object) -> str:
    """Return the name of an abstract unix socket that only this user's processes can compute."""
    # Any user of a node may take any such name, and keep others from it.
    return "\0hpcgpu-" + hmac.digest(user_secret().encode(), repr(parts).encode(), hashlib.sha256).hex()
