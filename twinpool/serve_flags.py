"""The flags of ``twinpool serve``: how they are spelled and explained. What they mean together is ``serve_config``'s."""

from __future__ import annotations

import argparse

from twinpool.engine_flags import add_engine_flags
from twinpool.model_source import DEFAULT_MODEL

DEFAULT_PORT = 8000
DEFAULT_LEASE_S = 6.0
DEFAULT_WORKER_WAIT_S = 30.0


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.description = "Start a router, prefill workers and decode workers."
    kinds = f"a .gguf file, a Hugging Face folder, org/name on the Hugging Face Hub, or {DEFAULT_MODEL} (default)"
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=kinds)
    add_engine_flags(parser)

    pools = parser.add_argument_group("pools")
    pools.add_argument("--prefill-workers", type=int, metavar="N", help="prefill workers (default: 1)")
    pools.add_argument("--decode-workers", type=int, metavar="N", help="decode workers (default: 1)")
    pools.add_argument("--colocated", action="store_true", help="one worker with both phases instead of two pools")
    pools.add_argument(
        "--transfer",
        default="auto",
        metavar="WAY",
        help="how KV pages travel: grpc, shared_memory (one host only), torch_distributed (gloo, or NCCL between GPUs) or auto "
        "(default), the fastest that reaches the worker",
    )
    pools.add_argument(
        "--trust-fabric",
        action="store_true",
        help="let torch_distributed, which can tell nobody apart, run on a cluster that keeps strangers out by a token",
    )

    pools.add_argument(
        "--address",
        default="local",
        metavar="CLUSTER",
        help="Ray cluster: local (of its own, default), auto (the running one) or HOST:PORT",
    )

    service = parser.add_argument_group("service")
    service.add_argument(
        "--config", metavar="FILE", help="YAML file with flags under the same names; what is given here wins over it"
    )
    service.add_argument("--served-model-name", metavar="NAME", help="the name clients ask for (default: MODEL's)")
    service.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    service.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="port to listen on, 0 for any free one (default: %(default)s)"
    )
    service.add_argument(
        "--warm-prompt",
        action="append",
        default=[],
        metavar="FILE",
        help="beginning of prompts, or of conversations (FILE.json), that each worker caches before it serves; may be repeated",
    )
    service.add_argument("--api-key", help="what clients must send as Authorization: Bearer …")
    service.add_argument("--admin-key", help="what callers of /admin must send instead (default: the API key)")
    service.add_argument(
        "--lease-seconds", type=float, default=DEFAULT_LEASE_S, metavar="S", help="lease of a sequence (default: %(default)g)"
    )
    service.add_argument(
        "--worker-wait",
        type=float,
        default=DEFAULT_WORKER_WAIT_S,
        metavar="S",
        help="how long a request waits for a worker (default: %(default)g)",
    )
