"""Documents become rows without losing, repeating or joining anything."""

import json

import pytest
from documents import (
    DataArguments,
    documents_of_files,
    get_tokenizer,
    load_documents,
    pack,
    packed_rows,
    train_tokenizer,
)
from hypothesis import given
from hypothesis import strategies as st

TEXTS = ["The first document.", "A second one, somewhat longer than the first.", "Third."]


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=8), st.integers(2, 7))
def test_rows_hold_every_token_once(documents, length):
    rows = pack(documents, length)
    tokens = [token for row in rows["input_ids"] for token in row]
    labels = [label for row in rows["labels"] for label in row]
    positions = [position for row in rows["position_ids"] for position in row]
    flat = [token for document in documents for token in document]
    assert tokens[: len(flat)] == flat and len(tokens) - len(flat) < length
    assert all(len(row) == length for name in ("input_ids", "labels", "position_ids") for row in rows[name])
    starts, offset = set(), 0
    for document in documents:
        starts.add(offset)
        offset += len(document)
    assert rows["continues"] == [start < len(flat) and start not in starts for start in range(0, len(tokens), length)]
    for index, label in enumerate(labels):
        counts = index < len(flat) and index not in starts
        assert label == (tokens[index] if counts else -100)
        if index < len(flat) and (index in starts or index % length == 0):
            assert positions[index] == 0
        elif index < len(flat):
            assert positions[index] == positions[index - 1] + 1


def test_files_of_every_kind(tmp_path):
    (tmp_path / "a.txt").write_text(TEXTS[0] + "\n\nstill the same document", encoding="utf-8")
    (tmp_path / "b.txt").write_text(TEXTS[1], encoding="utf-8")
    documents = documents_of_files([f"{tmp_path}/*.txt"])
    assert list(documents["text"]) == [TEXTS[0] + "\n\nstill the same document", TEXTS[1]]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    assert list(documents_of_files([f"{tmp_path}/c.jsonl"])["text"]) == TEXTS
    documents.to_parquet(tmp_path / "d.parquet")
    assert len(documents_of_files([f"{tmp_path}/d.parquet"])) == 2
    with pytest.raises(ValueError, match="one kind"):
        documents_of_files([f"{tmp_path}/a.txt", f"{tmp_path}/c.jsonl"])
    with pytest.raises(FileNotFoundError, match="nothing here"):
        documents_of_files([f"{tmp_path}/nothing here*"])


@pytest.mark.parametrize("streaming", [False, True])
def test_from_a_file_to_rows(tmp_path, streaming):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"words": text, "n": 1}) + "\n" for text in TEXTS), encoding="utf-8")
    data = DataArguments([str(path)], text_column="words", streaming=streaming, sequence_length=8)
    train, validation = load_documents(data)
    assert validation is None
    tokenizer = get_tokenizer(data, train)
    rows = list(packed_rows(train, tokenizer, data))
    assert set(rows[0]) == {"input_ids", "labels", "position_ids", "continues"}
    tokens = [token for row in rows for token in row["input_ids"]]
    text = tokenizer.decode(tokens)
    assert text.startswith(tokenizer.eos_token.join(TEXTS) + tokenizer.eos_token)


def test_tokenizer_knows_every_text(tmp_path):
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.save_pretrained(tmp_path)
    loaded = type(tokenizer).from_pretrained(tmp_path)
    for text in ("naïve — 你好", TEXTS[1]):
        assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.eos_token_id is not None


@pytest.mark.parametrize(
    "settings, message",
    [
        ({}, "train_files"),
        ({"train_files": ["x"], "dataset_name": "y"}, "dataset_name"),
        ({"train_files": ["x"], "sequence_length": 1}, "sequence_length=1"),
        ({"train_files": ["x"], "validation_fraction": 1.0}, "validation_fraction"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        DataArguments(**settings)


def test_missing_text_column(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "x"}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="body"):
        load_documents(DataArguments([f"{tmp_path}/a.jsonl"]))
