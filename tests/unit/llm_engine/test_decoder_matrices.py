from __future__ import annotations

from dataclasses import replace

from llm_engine.decoder_matrices import HEAD_MATRIX, decoder_matrices
from llm_engine.layer_config import LayerConfig
from llm_engine.model_config import ExpertsConfig
from tests.unit.llm_engine.tiny_config import TINY_CONFIG


def test_parts_that_see_the_same_input_share_a_matrix() -> None:
    matrices = decoder_matrices(replace(TINY_CONFIG, has_qkv_bias=True))
    qkv = matrices["layers.1.qkv"]
    assert qkv.weights == ("layers.1.query.weight", "layers.1.key.weight", "layers.1.value.weight")
    assert qkv.biases == ("layers.1.query.bias", "layers.1.key.bias", "layers.1.value.bias")
    assert (qkv.num_outs, qkv.num_out, qkv.num_in) == ((64, 32, 32), 128, 64)
    gate_up = matrices["layers.0.gate_up"]
    assert (gate_up.parts, gate_up.num_outs, gate_up.biases) == (("layers.0.gate", "layers.0.up"), (128, 128), ())
    assert len(matrices) == 2 * 4 + 1


def test_the_head_has_no_padding_and_may_be_the_embedding() -> None:
    tied = decoder_matrices(replace(TINY_CONFIG, num_tokens=260))[HEAD_MATRIX]
    untied = decoder_matrices(replace(TINY_CONFIG, is_tied=False))[HEAD_MATRIX]
    assert (tied.weights, tied.num_out) == (("embedding.weight",), 260)
    assert (untied.weights, untied.num_out) == (("head.weight",), 267)
    assert tied.is_head
    assert untied.is_head


def test_each_expert_has_matrices_of_its_own() -> None:
    experts = ExpertsConfig(num_experts=3, num_chosen=2, feed_forward_size=96, is_normalized=True)
    layers = (LayerConfig(rope=None, has_experts=True), LayerConfig(rope=None))
    matrices = decoder_matrices(replace(TINY_CONFIG, layers=layers, experts=experts))
    assert matrices["layers.0.experts.2.gate_up"].num_outs == (96, 96)
    assert matrices["layers.0.router"].is_router
    assert "layers.0.down" not in matrices
    assert "layers.1.router" not in matrices
