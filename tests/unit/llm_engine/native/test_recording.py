from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from llm_engine.native.library import NativeLibrary
from llm_engine.native.packed_weight import pack_bfloat16
from llm_engine.native.recording import Recording

MAX_TOKENS = 5
SIZE = 64


def test_no_kernel_runs_until_the_replay_and_then_for_so_many_tokens(library: NativeLibrary) -> None:
    x = torch.zeros(MAX_TOKENS, SIZE)
    delta = torch.randn(MAX_TOKENS, SIZE).bfloat16()
    norm = torch.randn(SIZE)
    weight = pack_bfloat16(torch.randn(32, SIZE).bfloat16())
    with library.recording(MAX_TOKENS) as recording:
        output = library.linear(library.add_rms_norm(x, delta, norm, 1e-5), weight, None)
    assert not x.any()
    for num_tokens in (3, 1, MAX_TOKENS):
        x.copy_(torch.randn(MAX_TOKENS, SIZE))
        before = x.clone()
        output.zero_()
        library.replay(recording, num_tokens)
        summed = before[:num_tokens].clone()
        expected = library.linear(library.add_rms_norm(summed, delta[:num_tokens].clone(), norm, 1e-5), weight, None)
        assert torch.equal(output[:num_tokens], expected)
        assert torch.equal(x[:num_tokens], summed)
        assert torch.equal(x[num_tokens:], before[num_tokens:])
        assert not output[num_tokens:].any()


def test_after_a_recording_kernels_run_at_once(library: NativeLibrary) -> None:
    with library.recording(1):
        pass
    weight = pack_bfloat16(torch.eye(32).bfloat16())
    assert torch.equal(library.linear(torch.ones(1, 32).bfloat16(), weight, None), torch.ones(1, 32).bfloat16())


def test_a_recording_takes_the_calls_of_its_own_thread_only(library: NativeLibrary) -> None:
    weight = pack_bfloat16(torch.eye(32).bfloat16())
    ones = torch.ones(1, 32).bfloat16()
    with library.recording(1) as recording, ThreadPoolExecutor(max_workers=1) as other:
        ours = library.linear(ones, weight, None)
        ours.zero_()
        assert torch.equal(other.submit(library.linear, ones, weight, None).result(), ones)
    assert not ours.any()
    library.replay(recording, 1)
    assert torch.equal(ours, ones)


def test_memory_goes_to_the_next_tensor_when_no_view_is_left() -> None:
    recording = Recording(MAX_TOKENS)
    first = recording.empty(4, 8, dtype=torch.bfloat16)
    address, view = first.data_ptr(), first.view(32)[16:]
    del first
    second = recording.empty(4, 8, dtype=torch.bfloat16)
    assert second.data_ptr() != address
    del view
    third = recording.empty(2, 8, dtype=torch.float32)
    assert third.data_ptr() == address
