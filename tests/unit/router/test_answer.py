from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.answer import Answer, Piece
from router.stop_strings import StopStrings
from serving_core.clock import ManualClock
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RequestId, SequenceKey
from serving_core.sampling_params import SamplingParams
from serving_core.token_event import FinishReason
from tests.unit.router.default_model import default_tokenizer, text_of
from tests.unit.router.front import ids_of
from tests.unit.router.scripted_generator import RecordedMetrics, Script, ScriptedGeneration

REQUEST = GenerateRequest(key=SequenceKey(RequestId("r")), prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=99))


def make_answer(
    script: Script, stops: list[str], metrics: RecordedMetrics, clock: ManualClock, *, min_tokens: int = 0
) -> Answer:
    return Answer(
        generation=ScriptedGeneration(script, REQUEST),
        tokenizer=default_tokenizer(),
        stops=StopStrings(stops),
        min_tokens=min_tokens,
        num_prompt_tokens=1,
        metrics=metrics,
        clock=clock,
        arrived_at=clock.now(),
    )


async def read(script: Script, stops: list[str], *, min_tokens: int = 0) -> tuple[str, FinishReason | None, int]:
    """Text, finish reason and number of counted tokens."""
    pieces: list[Piece] = []
    async with make_answer(script, stops, RecordedMetrics(), ManualClock(), min_tokens=min_tokens) as answer:
        while (piece := await answer.next_piece()) is not None:
            pieces.append(piece)
        assert [piece.finish_reason for piece in pieces] == [*[None] * (len(pieces) - 1), answer.finish_reason]
        return "".join(piece.text for piece in pieces), answer.finish_reason, len(pieces)


TOKEN_IDS = st.lists(st.integers(0, 400) | st.integers(0, 49_151), min_size=1, max_size=12)
STOPS = st.lists(st.text("ae t\ufffd\n", min_size=1, max_size=3), max_size=3)


@given(TOKEN_IDS, STOPS)
async def test_the_pieces_join_to_the_whole_text_cut_at_the_first_stop(token_ids: list[int], stops: list[str]) -> None:
    text, finish_reason, num_tokens = await read(Script(token_ids=token_ids, finish_reason=FinishReason.LENGTH), stops)
    finder = StopStrings(stops).search()
    expected = finder.push(text_of(token_ids))
    if finder.is_matched:
        assert (text, finish_reason) == (expected, FinishReason.STOP)
        before = StopStrings(stops).search()
        before.push(text_of(token_ids[: num_tokens - 1]).rstrip("\ufffd"))
        assert not before.is_matched, "the token before the last counted one did not complete a stop string yet"
    else:
        assert (text, finish_reason, num_tokens) == (expected + finder.finish(), FinishReason.LENGTH, len(token_ids))


async def test_an_end_token_is_counted_and_not_shown() -> None:
    script = Script(token_ids=[*ids_of("Hi there"), *ids_of("!")])  # an ordinary token can be an end token: stop_token_ids
    assert await read(script, []) == ("Hi there", FinishReason.STOP, 3)


async def test_times_are_measured_between_tokens() -> None:
    clock, metrics = ManualClock(), RecordedMetrics()
    async with make_answer(Script(token_ids=[100, 101, 102]), [], metrics, clock) as answer:
        for seconds in (5.0, 1.0, 2.0):
            clock.advance(seconds)
            await answer.next_piece()
    assert (metrics.first_tokens, metrics.inter_tokens) == ([5.0], [1.0, 2.0])
    assert metrics.finished == [("stop", 1, 3)]


async def test_nothing_comes_after_the_end() -> None:
    async with make_answer(Script(token_ids=[2]), [], RecordedMetrics(), ManualClock()) as answer:
        piece = await answer.next_piece()
        assert piece is not None
        assert (piece.text, piece.finish_reason) == ("", FinishReason.STOP)
        assert await answer.next_piece() is None
        assert await answer.next_piece() is None


async def test_stop_strings_count_from_min_tokens_on() -> None:
    script = Script(token_ids=[*ids_of("one two one two"), 2])
    assert await read(script, ["two"]) == ("one ", FinishReason.STOP, 2)
    assert await read(script, ["two"], min_tokens=2) == ("one two one ", FinishReason.STOP, 4)
    assert await read(script, ["two"], min_tokens=4) == ("one two one two", FinishReason.STOP, 5)


async def test_offsets_count_complete_characters() -> None:
    token_ids = ids_of("a🙂b")
    assert len(token_ids) > 3, "the emoji takes several tokens"
    async with make_answer(Script(token_ids=[*token_ids, 2]), [], RecordedMetrics(), ManualClock()) as answer:
        pieces = [await answer.next_piece() for _ in [*token_ids, 2]]
    offsets = [piece.token.text_offset for piece in pieces if piece is not None]
    assert offsets == [0, *[1] * (len(token_ids) - 2), 2, 3]
