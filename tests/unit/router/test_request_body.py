"""Any bytes and any JSON in place of a body: a checked body or one clear refusal, never anything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.openai_schemas import ChatCompletionBody, CompletionBody, GenerateBody
from router.request_body import RequestBody, parse_body
from router.token_schemas import DetokenizeBody, TokenizeBody
from serving_core.errors import InvalidRequest

SCHEMAS = (ChatCompletionBody, CompletionBody, GenerateBody, TokenizeBody, DetokenizeBody)
GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "tokens": [5]}
MAX_SENTENCE_CHARS = 2000

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=30)
names = st.text(max_size=8)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4))
texts = values.map(json.dumps) | st.text(max_size=200)


def refusal_of(content: bytes, schema: type[RequestBody]) -> InvalidRequest | None:
    try:
        parse_body(content, schema)
    except InvalidRequest as refused:
        return refused
    return None


def assert_is_clear(refused: InvalidRequest | None) -> None:
    assert refused is None or (refused.code and 0 < len(str(refused)) <= MAX_SENTENCE_CHARS)


@pytest.mark.parametrize("schema", SCHEMAS)
@given(content=st.binary(max_size=200) | texts.map(str.encode))
def test_any_body(schema: type[RequestBody], content: bytes) -> None:
    assert_is_clear(refusal_of(content, schema))


@pytest.mark.parametrize("schema", SCHEMAS)
@given(data=st.data())
def test_any_value_of_any_field(schema: type[RequestBody], data: st.DataObject) -> None:
    fields = st.sampled_from([*schema.model_fields, *schema.neutral_values])
    changed = data.draw(st.dictionaries(fields, values, min_size=1, max_size=3))
    assert_is_clear(refusal_of(json.dumps({**GOOD, **changed}).encode(), schema))
