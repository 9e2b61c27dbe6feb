"""How the cluster object outside finds the scheduler: a file in a private folder on the shared file system."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpcgpu.deploy.trust import Certificate, secret
from hpcgpu.host import private

_NONCE = "nonce"
_CONTACT = "contact"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """What rank 0 writes once the workers are there.

    Attributes
    ----------
    nonce : str
        Written to the folder by the object that submitted the job: a file of another life has another one.

    """

    addresses: tuple[str, ...]
    node: str
    job_id: str = ""
    restart_count: int = 0
    cert: str = ""
    key: str = field(default="", repr=False)
    nonce: str = field(default="", repr=False)
    dashboard_port: int = 0
    dashboard_secret: str = field(default="", repr=False)

    @property
    def certificate(self) -> Certificate | None:
        """The cluster's certificate; None without TLS."""
        return Certificate(self.cert, self.key) if self.cert else None


def make_folder(home: Path) -> Path:
    """Make the folder of a new run below ``home``, and put a nonce into it."""
    private.make_folder(home)
    folder = private.make_folder(home / secrets.token_hex(8))
    private.write(folder / _NONCE, secret())
    return folder


def publish(folder: Path, contact: Contact) -> None:
    """Write the contact with the nonce that lies in the folder; called by rank 0."""
    facts = asdict(contact) | {"nonce": private.read(folder / _NONCE)}
    private.write(folder / _CONTACT, json.dumps(facts))


def retract(folder: Path) -> None:
    """Remove what is secret, at the end of the job: a client that was killed cannot do it."""
    for name in (_CONTACT, _NONCE):
        (folder / name).unlink(missing_ok=True)


def read(folder: Path) -> Contact | None:
    """Return the contact; None as long as there is none of this run."""
    # listing the folder makes NFS look again, where asking for one name may be answered from its cache
    if _CONTACT not in {p.name for p in folder.iterdir()}:
        return None
    facts = json.loads(private.read(folder / _CONTACT))
    if facts["nonce"] != private.read(folder / _NONCE):
        return None
    return Contact(**{**facts, "addresses": tuple(facts["addresses"])})
