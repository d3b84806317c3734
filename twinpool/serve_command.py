"""``twinpool serve``: everything that can be refused is refused before the first process is started."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os

from llm_engine.gguf_file import GgufFile
from llm_engine.model_config import ModelConfig
from twinpool.http_server import listen
from twinpool.serve_config import make_serve_config
from twinpool.worker_specs import make_worker_specs, plan_server_cores


def serve_command(flags: argparse.Namespace) -> int:
    """Run a server until it is stopped by a signal. Returns 0; raises ``TwinpoolError`` when it cannot start."""
    config = make_serve_config(flags)
    with listen(config.host, config.port) as listener:
        with GgufFile(config.model.path) as file:
            model = ModelConfig.from_gguf(file)
        cores = plan_server_cores(config, sorted(os.sched_getaffinity(0)))
        make_worker_specs(config, model, cores, ())

        logging.basicConfig(level=logging.INFO, format="%(message)s")
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        # Ray starts processes while the router's gRPC threads run; none of them uses gRPC before it has become another program
        os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # broken connections are ours to report
        from twinpool.server import Server

        asyncio.run(Server(config, model, cores, listener).run())
    return 0
