"""llama.cpp through the low-level bindings of llama-cpp-python, in that package's own environment."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.engines.arm import DecodeRun, run_arm
from benchmarks.engines.workload import Workload

_CELL_MULTIPLE = 256  # llama.cpp rounds each sequence's share of the cache up to this
_MIN_BATCH = 512


class LlamaCppEngine:
    """One model; a context of its own for every measurement, sized for it. Keys and values are float16, its default."""

    def __init__(self, workload: Workload) -> None:
        self._num_threads = workload.num_threads
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(workload.model_path.encode(), params)
        assert self._model, f"llama.cpp loads {workload.model_path}"
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self.setup = f"llama-cpp-python {llama_cpp.__version__}, weights as in the file, prefill in one batch"

    def prefill(self, prompt: Sequence[int]) -> float:
        with self._context(num_sequences=1, sequence_tokens=len(prompt)) as context:
            return self._prefill(context, prompt)[1]

    def decode(self, prompt: Sequence[int], *, batch: int, num_steps: int) -> DecodeRun:
        with self._context(num_sequences=batch, sequence_tokens=len(prompt) + num_steps) as context:
            first_token, _ = self._prefill(context, prompt)
            memory = llama_cpp.llama_get_memory(context)
            for sequence in range(1, batch):
                llama_cpp.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
            tokens = [first_token] * batch
            step_s, token_ids = [], [first_token]
            for position in range(len(prompt), len(prompt) + num_steps):
                begin = time.perf_counter()
                self._run(context, [(token, position, sequence) for sequence, token in enumerate(tokens)], range(batch))
                tokens = [self._most_likely(context, row) for row in range(batch)]
                step_s.append(time.perf_counter() - begin)
                token_ids.append(tokens[0])
        return DecodeRun(step_s=tuple(step_s), token_ids=tuple(token_ids))

    @contextmanager
    def _context(self, *, num_sequences: int, sequence_tokens: int) -> Iterator[Any]:
        """A prompt goes through in one piece, however long."""
        cells = -(-sequence_tokens // _CELL_MULTIPLE) * _CELL_MULTIPLE
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_sequences * cells
        params.n_seq_max = num_sequences
        params.n_batch = params.n_ubatch = max(sequence_tokens, _MIN_BATCH)
        params.n_threads = params.n_threads_batch = self._num_threads
        params.kv_unified = False  # a cache for each sequence, so that none looks at the keys of the others
        params.no_perf = True
        context = llama_cpp.llama_init_from_model(self._model, params)
        assert context, "llama.cpp makes a context"
        try:
            yield context
        finally:
            llama_cpp.llama_free(context)

    def _prefill(self, context: Any, prompt: Sequence[int]) -> tuple[int, float]:
        """The first token, and the seconds to it."""
        begin = time.perf_counter()
        last = len(prompt) - 1
        self._run(context, [(token, position, 0) for position, token in enumerate(prompt)], (last,))
        token = self._most_likely(context, last)
        return token, time.perf_counter() - begin

    def _run(self, context: Any, tokens: Sequence[tuple[int, int, int]], sampled: Sequence[int]) -> None:
        """One batch of (token id, position, sequence), with logits for the places ``sampled``."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for place, (token, position, sequence) in enumerate(tokens):
                batch.token[place] = token
                batch.pos[place] = position
                batch.n_seq_id[place] = 1
                batch.seq_id[place][0] = sequence
                batch.logits[place] = False
            for place in sampled:
                batch.logits[place] = True
            status = llama_cpp.llama_decode(context, batch)
            assert status == 0, f"llama_decode returned {status}"
        finally:
            llama_cpp.llama_batch_free(batch)

    def _most_likely(self, context: Any, place: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, place)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self._vocab_size,))))


if __name__ == "__main__":
    run_arm(LlamaCppEngine)
