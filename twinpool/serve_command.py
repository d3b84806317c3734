"""``twinpool serve``: everything that can be refused is refused before the first process is started."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from llm_engine.checkpoint import StoredModel
from llm_engine.model_config import ModelConfig
from llm_engine.native.kernels import why_no_kernels
from llm_engine.open_checkpoint import read_stored_model
from llm_engine.weight_plan import has_native_form
from router.chat_template import read_chat_template
from router.prompt_encoder import PromptEncoder
from router.tokenizer import read_tokenizer
from router.warm_prompts import read_warm_prompts
from twinpool.cluster import LOCAL
from twinpool.http_server import listen
from twinpool.machine_memory import available_memory_bytes
from twinpool.memory_plan import check_memory, check_warm_prompts, describe_memory, worker_memory
from twinpool.serve_config import ServeConfig, make_serve_config
from twinpool.worker_spec import WorkerSpec
from twinpool.worker_specs import check_quantizations, make_worker_specs, plan_server_cores

_log = logging.getLogger(__name__)


def serve_command(flags: argparse.Namespace) -> int:
    """Run a server until it is stopped by a signal. Returns 0; raises ``TwinpoolError`` when it cannot start."""
    config = make_serve_config(flags)
    stored = read_stored_model(config.model.path)
    model = stored.config
    tokenizer, chat_template = read_tokenizer(config.model.path), read_chat_template(config.model.path)
    window = config.max_model_len(model.max_model_len)
    encoder = PromptEncoder(tokenizer=tokenizer, chat_template=chat_template, max_model_len=lambda: window)
    warm_prompts = asyncio.run(read_warm_prompts(config.warm_prompts, encoder, max_model_len=window))
    cores = plan_server_cores(config, sorted(os.sched_getaffinity(0)))
    specs = make_worker_specs(config, model, cores, ())
    check_warm_prompts(specs, model, warm_prompts)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    has_kernels = config.address != LOCAL  # of nodes that others run it is not known, and assumed
    if _wants_kernels(config, specs, model):
        missing = why_no_kernels()
        has_kernels = missing is None
        if missing is not None:
            check_quantizations(config, specs, model, why_no_kernels=missing)
            _log.warning("Torch computes: the native kernels %s.", missing)
            config = config.without_kernels()
    if config.address == LOCAL and not config.is_on_gpus:  # a GPU's memory is checked by the worker that takes it
        check_memory(specs, stored, available_memory_bytes(), has_kernels=has_kernels)
    with listen(config.host, config.port) as listener:
        # Ray starts processes while the router's gRPC threads run; none of them uses gRPC before it has become another program
        os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # broken connections are ours to report
        if not sys.stderr.isatty():
            os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # of workers' lines, which would come in colours
        from twinpool.server import Server

        _describe(config, stored, specs, has_kernels=has_kernels)
        server = Server(
            config,
            model=model,
            tokenizer=tokenizer,
            chat_template=chat_template,
            warm_prompts=warm_prompts,
            core_plan=cores,
            listener=listener,
        )
        asyncio.run(server.run())
    _log.info("stopped")
    return 0


def _wants_kernels(config: ServeConfig, specs: Sequence[WorkerSpec], model: ModelConfig) -> bool:
    """Whether workers on this machine will compute with the native kernels, if those run here."""
    if config.address != LOCAL or config.is_on_gpus:
        return False
    return any(
        has_native_form(spec.engine.dtype, model, has_kernels=not spec.engine.is_eager(phase))
        for spec in specs
        for phase in spec.phases
    )


def _describe(config: ServeConfig, stored: StoredModel, specs: Sequence[WorkerSpec], *, has_kernels: bool) -> None:
    """Say what was resolved, so that nobody has to guess what "auto" came to."""
    _log.info("%s: %s, window of %d tokens", config.served_model_name, config.model.path, stored.config.max_model_len)
    for spec in specs:
        engine, memory = spec.engine, describe_memory(worker_memory(spec, stored, has_kernels=has_kernels))
        _log.info("%s: %s, %d tokens at most, %s", spec.worker_id, engine.dtype.value, engine.max_model_len, memory)
