from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving_core.errors import ModelFileError
from serving_core.model_json import ModelJson


def of(**values: Any) -> ModelJson:
    return ModelJson("f.json", values)


def test_null_is_absent() -> None:
    values = of(a=None, b=0)
    assert "a" not in values
    assert list(values) == ["b"]
    assert values.count("a", default=7) == 7
    assert (values.text("a"), values.section("a"), values.sections("a"), values.ids("a")) == (None, None, [], frozenset())
    values.refuse_unless("a", "only this")


def test_values_are_read() -> None:
    values = of(n=3, x=0.5, yes=True, text="t", one=2, many=[2, 5], inner={"n": 4}, list=[{"n": 5}])
    assert (values.count("n"), values.number("x"), values.number("n"), values.text("text")) == (3, 0.5, 3.0, "t")
    assert values.flag("yes", default=False)
    assert values.ids("one") == {2}
    assert values.ids("many") == {2, 5}
    inner = values.section("inner")
    assert inner is not None
    assert [inner.count("n"), *(item.count("n") for item in values.sections("list"))] == [4, 5]
    assert [of(t="<s>").token_text("t"), of(t={"content": "<s>"}).token_text("t"), of().token_text("t")] == ["<s>", "<s>", None]


WRONG: list[tuple[Callable[[ModelJson], object], tuple[object, ...]]] = [
    (lambda values: values.count("k"), (0, -1, 1.5, True, "3", [3], 2**30 + 1, 10**400)),
    (lambda values: values.number("k"), (0, -0.5, 1e-300, 1e300, 10**400, float("inf"), float("nan"), False, "x")),
    (lambda values: values.flag("k", default=True), (0, 1, "true")),
    (lambda values: values.text("k"), (1, ["x"], {})),
    (lambda values: values.ids("k"), (-1, True, [1, None], "2", [[1]])),
    (lambda values: values.section("k"), ("x", [], 1)),
    (lambda values: values.sections("k"), ("x", {}, [1])),
    (lambda values: values.token_text("k"), (1, [], {"content": 1})),
    (lambda values: values.refuse_unless("k", "a", "b"), ("c", 1, [])),
]


@pytest.mark.parametrize(("read", "value"), [(read, value) for read, values in WRONG for value in values])
def test_another_kind_of_value_is_named(read: Callable[[ModelJson], object], value: object) -> None:
    with pytest.raises(ModelFileError, match=r"f\.json.* has .* for (k|content), which must be"):
        read(of(k=value))


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ModelFileError, match=r"f\.json lacks k, which must be a whole number from 1 to 1073741824"):
        of().count("k")
    with pytest.raises(ModelFileError, match=r"f\.json, inner, lacks k"):
        of(inner={}).section("inner").count("k")  # type: ignore[union-attr]


def test_a_long_value_is_cut_short() -> None:
    with pytest.raises(ModelFileError) as caught:
        of(k="x" * 10_000).count("k")
    assert len(str(caught.value)) < 250


def test_a_file_may_be_optional(tmp_path: Path) -> None:
    assert list(ModelJson.read_optional(tmp_path / "none.json")) == []
    with pytest.raises(ModelFileError, match=r"none\.json cannot be read: No such file"):
        ModelJson.read(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ModelFileError, match=r"list\.json must hold a JSON object"):
        ModelJson.read_optional(tmp_path / "list.json")
