"""The prompts on which answers are compared at length."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from router.chat_template import ChatMessage, read_chat_template
from router.tokenizer import read_tokenizer

_QUESTIONS = Path(__file__).parent / "data" / "mt_bench_80.jsonl"


def prompts_of_lengths(model: Path, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    text = "The lighthouse keeper wrote down every ship that passed, and in winter there were few. " * 4
    token_ids = read_tokenizer(model).encode(text, add_special_tokens=True)
    return [token_ids[:length] for length in lengths]


def mt_bench_turns(model: Path, num_turns: int) -> list[tuple[int, ...]]:
    """The questions' first turns as chat prompts."""
    tokenizer, template = read_tokenizer(model), read_chat_template(model)
    questions = [json.loads(line) for line in _QUESTIONS.read_text().splitlines()[:num_turns]]
    texts = [template.render([ChatMessage(role="user", content=question["turns"][0])]) for question in questions]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]
