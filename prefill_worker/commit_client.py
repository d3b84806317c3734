"""The prefill worker's way to Decode.Commit, with a deadline per call. gRPC's errors end here."""

from __future__ import annotations

import grpc.aio

from serving_core.errors import WorkerLost
from serving_core.rpc import convert
from serving_core.rpc.channel_cache import ChannelCache
from serving_core.rpc.cluster_token import OPEN, ClusterToken
from serving_core.rpc.v1 import decode_pb2, decode_pb2_grpc
from serving_core.transfer_ticket import HandoffCommit, TransferTicket


class CommitClient:
    """Commits to any decode worker. Lives on one event loop; owns its channels. ``timeout_s`` bounds each call."""

    def __init__(self, *, token: ClusterToken = OPEN, timeout_s: float = 5.0) -> None:
        assert timeout_s > 0
        self._metadata = token.metadata
        self._timeout_s = timeout_s
        self._channels = ChannelCache()

    def to(self, ticket: TransferTicket) -> TicketCommitter:
        """A ``Committer`` for the worker that issued the ticket. Opens nothing yet."""
        return TicketCommitter(self, ticket)

    async def commit(self, ticket: TransferTicket, commit: HandoffCommit) -> None:
        """Raises ``Refused`` when the decode worker declined, ``WorkerLost`` when no answer came in time."""
        async with self._channels.use(ticket.decode_address, ticket.decode_incarnation) as shared:
            request = decode_pb2.CommitRequest(commit=convert.commit_to_pb(commit))
            try:
                reply = await decode_pb2_grpc.DecodeStub(shared.channel).Commit(
                    request, timeout=self._timeout_s, metadata=self._metadata
                )
            except grpc.aio.AioRpcError as error:
                shared.retire()
                raise WorkerLost(
                    f"The commit to {shared.address} got no answer ({error.code().name}: {error.details()})."
                ) from error
        if reply.HasField("refusal"):
            raise convert.refusal_from_pb(reply.refusal)

    async def close(self) -> None:
        """Release every channel and take no more commits. Idempotent; meant for when no commit is under way any more."""
        await self._channels.close()


class TicketCommitter:
    """The ``Committer`` of one hand-off."""

    def __init__(self, client: CommitClient, ticket: TransferTicket) -> None:
        self._client = client
        self._ticket = ticket

    async def commit(self, commit: HandoffCommit) -> None:
        await self._client.commit(self._ticket, commit)
