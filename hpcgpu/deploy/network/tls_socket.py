"""TLS sockets of which one that breaks does not take others with it.

OpenSSL keeps a queue of errors for each thread, and what reads or writes next takes an error that still stands there
for its own. From OpenSSL 3.4 on a peer that has gone leaves one (a last alert that cannot be sent), which CPython
3.12 to 3.14 raises as BrokenPipeError without removing it (github.com/python/cpython, issues 127257 and 148594): then
the next connection of the event loop that has nothing to read is closed, too. With Python 3.13.5 and OpenSSL 3.5 three
workers of four were lost so when they registered.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from typing import Any


class TlsSocket(ssl.SSLSocket):
    """An SSLSocket that leaves no error behind, for ``SSLContext.sslsocket_class``."""

    def do_handshake(self, block: bool = False) -> None:
        """Perform the handshake; tickets that could not be sent after it are no error, but leave one."""
        super().do_handshake(block)
        forget_errors()

    def read(self, len: int = 1024, buffer: Any = None) -> Any:  # noqa: A002, ANN401 - as there
        """Read; ``recv`` and ``recv_into`` come here."""
        try:
            got = super().read(len, buffer)
        except ssl.SSLError:
            raise  # CPython forgets after its own
        except OSError:
            forget_errors()
            raise
        if not got:
            forget_errors()  # the peer has gone, and may have been sent an alert
        return got

    def send(self, data: Any, flags: int = 0) -> int:  # noqa: ANN401 - as there
        """Write."""
        try:
            return super().send(data, flags)
        except ssl.SSLError:
            raise
        except OSError:
            forget_errors()
            raise


def forget_errors() -> None:
    """Empty this thread's queue of OpenSSL errors: ``set_ciphers`` does when it fails (_ssl.c), and nothing else."""
    with suppress(ssl.SSLError):
        _NOBODYS.set_ciphers("no cipher of this name")


_NOBODYS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
