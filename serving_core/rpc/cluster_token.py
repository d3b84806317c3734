"""What tells the processes of one server from strangers: a secret that the server draws at each start and gives to its workers.

It goes with every gRPC call (RFC 6750's header); sockets of our own show a proof of it instead. So whoever can merely connect
gets nothing. It is not encrypted: whoever can listen in, or take over the address of a worker that has ended, learns it, and
keeping them out is the network's business.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

PROOF_BYTES = 32
_HEADER = "authorization"


@dataclass(frozen=True, slots=True)
class ClusterToken:
    """``value`` is ASCII without spaces, and never shown. An empty one belongs to a server that asks for none: ``OPEN``."""

    value: str = field(repr=False)

    @classmethod
    def draw(cls) -> ClusterToken:
        """One that nobody can guess."""
        return cls(secrets.token_hex(32))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call has to carry."""
        return ((_HEADER, f"Bearer {self.value}"),) if self.value else ()

    def admits(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether a call with ``metadata`` comes from a member. In the same time for every wrong token."""
        if not self.value:
            return True
        expected = f"Bearer {self.value}".encode()
        return any(hmac.compare_digest(_as_bytes(value), expected) for key, value in metadata if key == _HEADER)

    def proof(self, purpose: bytes) -> bytes:
        """``PROOF_BYTES`` that only a member knows, and that are worth nothing for another purpose. Zeros when open."""
        return hmac.digest(self.value.encode(), purpose, "sha256") if self.value else bytes(PROOF_BYTES)


OPEN = ClusterToken("")
"""Of those whose sockets nobody else reaches, such as tests."""


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
