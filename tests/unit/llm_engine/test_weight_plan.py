from __future__ import annotations

from dataclasses import replace

import pytest

from llm_engine.checkpoint import StoredModel, StoredTensor
from llm_engine.decoder_tensors import tensor_shapes
from llm_engine.layer_config import LayerConfig
from llm_engine.model_config import ExpertsConfig, ModelConfig
from llm_engine.weight_form import WeightForm
from llm_engine.weight_plan import plan_weights, simplest_alike, usable_quantization, weight_bytes
from serving_core.engine_config import Quantization
from serving_core.errors import ConfigError
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName
from tests.unit.llm_engine.tiny_config import TINY_CONFIG

INT4, INT8, BFLOAT16 = WeightForm


def stored_as(form: WeightForm, *, config: ModelConfig = TINY_CONFIG, **others: tuple[WeightForm, WeightForm]) -> StoredModel:
    """All tensors in ``form``, but for those that end in ``.NAME.weight``: (form, exact form)."""

    def forms(name: str) -> tuple[WeightForm, WeightForm]:
        return others.get(name.split(".")[-2], (form, form)) if name.endswith(".weight") else (BFLOAT16, BFLOAT16)

    tensors = {
        name: StoredTensor(name=name, shape=shape, num_bytes=0, form=forms(name)[0], exact_form=forms(name)[1])
        for name, shape in tensor_shapes(config).items()
    }
    return StoredModel(config=config, tensors=tensors)


def forms_of(stored: StoredModel, quantization: Quantization) -> dict[str, WeightForm]:
    """Of the first layer and the head."""
    forms = plan_weights(stored, quantization).forms
    return {name.removeprefix("layers.0."): form for name, form in forms.items() if not name.startswith("layers.1.")}


def test_auto_is_what_is_stored_and_the_widest_of_what_shares_a_matrix() -> None:
    stored = stored_as(INT4, value=(INT8, BFLOAT16), up=(BFLOAT16, BFLOAT16), embedding=(INT8, INT8))
    assert forms_of(stored, Quantization.AUTO) == {
        "qkv": INT8,
        "attention_out": INT4,
        "gate_up": BFLOAT16,
        "down": INT4,
        "head": INT8,
    }


def test_a_form_that_was_asked_for_holds_for_all_but_head_and_router() -> None:
    experts = ExpertsConfig(num_experts=2, num_chosen=1, feed_forward_size=96, is_normalized=True)
    config = replace(TINY_CONFIG, layers=(LayerConfig(rope=None, has_experts=True),), experts=experts)
    for quantization, form in ((Quantization.INT8, INT8), (Quantization.INT4, INT4)):
        forms = forms_of(stored_as(BFLOAT16, config=config), quantization)
        assert forms.pop("head") is INT8
        assert forms.pop("router") is BFLOAT16
        assert set(forms.values()) == {form}


@pytest.mark.parametrize(
    ("embedding", "quantization", "is_shared"),
    [
        ((INT8, INT8), Quantization.AUTO, True),
        ((INT4, INT4), Quantization.INT8, True),
        ((BFLOAT16, BFLOAT16), Quantization.AUTO, True),
        ((INT8, BFLOAT16), Quantization.AUTO, False),  # blocks that are not ours
        ((BFLOAT16, BFLOAT16), Quantization.INT8, False),
    ],
)
def test_tokens_are_looked_up_in_a_tied_head_that_holds_them_exactly(
    embedding: tuple[WeightForm, WeightForm], quantization: Quantization, *, is_shared: bool
) -> None:
    assert plan_weights(stored_as(INT4, embedding=embedding), quantization).is_embedding_shared == is_shared
    untied = stored_as(INT4, config=replace(TINY_CONFIG, is_tied=False), embedding=embedding)
    assert not plan_weights(untied, quantization).is_embedding_shared


def test_what_comes_to_the_same_plan_is_held_and_counted_once() -> None:
    def bytes_of(stored: StoredModel, *quantizations: Quantization) -> int:
        return weight_bytes(stored, KVDType.BFLOAT16, quantizations, has_kernels=True)

    plain, packed = stored_as(BFLOAT16), stored_as(INT4)
    none, auto, int8 = Quantization.NONE, Quantization.AUTO, Quantization.INT8
    assert simplest_alike(plain, auto) is none
    assert bytes_of(plain, none, auto) == bytes_of(plain, none)
    assert simplest_alike(packed, auto) is auto
    assert bytes_of(packed, none, auto) == bytes_of(packed, none) + bytes_of(packed, auto)
    assert simplest_alike(stored_as(INT8), int8) is auto
    assert simplest_alike(plain, int8) is int8


ODD_CONFIG = replace(TINY_CONFIG, feed_forward_size=100)


@pytest.mark.parametrize(
    ("dtype", "config", "has_kernels", "reason"),
    [
        (KVDType.FLOAT32, TINY_CONFIG, True, "computes in bfloat16, but --dtype is float32"),
        (KVDType.FLOAT16, TINY_CONFIG, True, "computes in bfloat16, but --dtype is float16"),
        (KVDType.BFLOAT16, ODD_CONFIG, True, "a multiple of 32 weights, and this model has some of 100"),
        (KVDType.BFLOAT16, TINY_CONFIG, False, "needs the native kernels, which do not run on this machine"),
    ],
)
def test_what_cannot_be_is_refused_where_it_was_asked_for(
    dtype: KVDType, config: ModelConfig, reason: str, *, has_kernels: bool
) -> None:
    def usable(asked: Quantization) -> Quantization:
        return usable_quantization(asked, PhaseName.DECODE, dtype=dtype, config=config, has_kernels=has_kernels)

    assert usable(Quantization.AUTO) is usable(Quantization.NONE) is Quantization.NONE
    for asked in (Quantization.INT8, Quantization.INT4):
        flag = "--decode-quantization"
        with pytest.raises(ConfigError, match=f"{flag} is {asked.value}, which .*{reason}.*; give {flag} none"):
            usable(asked)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_an_eager_phase_has_plain_weights(*, has_kernels: bool) -> None:
    def usable(asked: Quantization) -> Quantization:
        return usable_quantization(
            asked, PhaseName.DECODE, dtype=KVDType.BFLOAT16, config=TINY_CONFIG, has_kernels=has_kernels, is_eager=True
        )

    assert usable(Quantization.AUTO) is usable(Quantization.NONE) is Quantization.NONE
    for asked in (Quantization.INT8, Quantization.INT4):
        with pytest.raises(ConfigError, match=f"{asked.value}, which needs the native kernels, which --enforce-eager leaves"):
            usable(asked)


@pytest.mark.parametrize("asked", Quantization)
def test_what_can_be_is_done(asked: Quantization) -> None:
    usable = usable_quantization(asked, PhaseName.PREFILL, dtype=KVDType.BFLOAT16, config=TINY_CONFIG, has_kernels=True)
    assert usable is asked
