"""A secret that all processes of a user have, on all nodes with this home, and nobody else."""

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
    """Return the secret in ``~/.hpcgpu/user/secret``, which is made once and kept.

    Raises
    ------
    HpcGpuError
        It cannot be kept there, or others could have read it.

    """
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


def hidden_name(*words: object) -> str:
    """Return the name of an abstract unix socket that only this user's processes can know beforehand.

    Everybody on a node may take any name there, and keep another user from it.
    """
    return "\0hpcgpu-" + hmac.digest(user_secret().encode(), repr(words).encode(), hashlib.sha256).hex()
