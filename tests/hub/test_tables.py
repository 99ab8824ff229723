"""Tables of results.json in cards: as they were measured, and nothing else that a file may hold."""

import pytest

from hf_hybrid_ssm.hub.tables import Table, tables_of

TABLE = Table("Loss by position", ["model", "256-512"], [["teacher", "3.554"], ["student", "13.5"]])
TEXT = """Loss by position

| model   | 256-512 |
| ------- | ------: |
| teacher |   3.554 |
| student |    13.5 |"""


def test_markdown():
    assert str(TABLE) == TEXT
    assert tables_of({"tables": [TABLE.as_json()]}) == [TABLE] and tables_of({"loss": 1.0}) == []


def test_cells_of_others_stay_in_their_cells():
    text = str(Table("a\n# b", ["c|d"], [["<script>\n\x1b[2J"], [""]]))
    assert "\n#" not in text and "<script" not in text and "\x1b" not in text and "c\\|d" in text
    assert len(text.splitlines()) == 6


@pytest.mark.parametrize(
    "given",
    [
        "text", [1], [{"title": "a"}], [TABLE.as_json() | {"more": 1}], [TABLE.as_json()] * 101,
        [TABLE.as_json() | {"rows": [["one"]]}], [TABLE.as_json() | {"rows": [["one", 2]]}],
        [TABLE.as_json() | {"rows": "ab"}], [TABLE.as_json() | {"columns": "ab"}],
        [TABLE.as_json() | {"rows": [["a", "b"]] * 101}], [TABLE.as_json() | {"columns": [], "rows": []}],
    ],
)  # fmt: skip
def test_what_is_no_table_is_refused(given):
    with pytest.raises(ValueError, match=r"results\.json: "):
        tables_of({"tables": given})
