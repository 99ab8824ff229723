"""Documents become rows without losing, repeating or joining anything."""

from collections import Counter
from itertools import chain, islice

import numpy as np
import pytest
import torch
from _lib.documents import (
    DataArguments,
    begin_of,
    documents_of_files,
    get_tokenizer,
    load_documents,
    train_tokenizer,
)
from _lib.rows import pack, packed_rows, shuffled, split_rows
from _lib.scoring import scored_documents, token_losses
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, default_data_collator

import hf_hybrid_ssm  # noqa: F401 - registers the families
from tests.recipes.small import write_lines

TEXTS = ["The first document.", "A second one, somewhat longer than the first.", "Third."]


BEGIN, END = 10, 11


def columns(rows):
    rows = list(rows)
    return {name: [np.asarray(row[name]).tolist() for row in rows] for name in rows[0]} if rows else {}


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=8), st.integers(2, 7))
def test_rows_hold_every_token_once(documents, length):
    rows = columns(pack(documents, length, BEGIN, END))
    documents = [document for document in documents if document]
    if not documents:
        assert not rows
        return
    flattened = (chain.from_iterable(rows[name]) for name in ("input_ids", "labels", "position_ids"))
    tokens, labels, positions = map(list, flattened)
    flat = [token for document in documents for token in [BEGIN, *document]]
    targets = [token for document in documents for token in [*document, END]]
    assert tokens[: len(flat)] == flat and len(tokens) - len(flat) < length
    assert all(len(row) == length for name in ("input_ids", "labels", "position_ids") for row in rows[name])
    starts = {index for index, token in enumerate(flat) if token == BEGIN}
    assert rows["continues"] == [start not in starts for start in range(0, len(tokens), length)]
    for index, label in enumerate(labels):
        counts = index % length != 0 and index <= len(flat)
        assert label == (targets[index - 1] if counts else -100)
        if index < len(flat) and (index in starts or index % length == 0):
            assert positions[index] == 0
        elif index < len(flat):
            assert positions[index] == positions[index - 1] + 1


@pytest.mark.parametrize("model_type", ["longhorn", "llama"])
@pytest.mark.parametrize("begin", [10, 11], ids=["own beginning", "the end begins"])
def test_rows_train_what_is_scored(model_type, begin):
    """The first token of a document is a target, given the beginning alone; none sees another document."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 12, "bos_token_id": begin, "eos_token_id": END}
    sizes |= {"intermediate_size": 32, "num_attention_heads": 2} if model_type == "llama" else {"state_size": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes)).double().eval()
    documents = [torch.randint(0, 10, (size,)).tolist() for size in (5, 1, 9, 4)]
    batch = default_data_collator(list(pack(documents, 26, begin, END)))
    batch.pop("continues")
    with torch.no_grad():
        packed = model(**batch, use_cache=False)
        assert int((batch["labels"] != -100).sum()) == sum(len(document) + 1 for document in documents)
        losses = [token_losses(model, torch.tensor([begin, *document, END])) for document in documents]
        assert packed.loss.item() == pytest.approx(torch.cat(losses).mean().item(), rel=1e-6)
        for number, index in enumerate((0, 6, 8, 18)):
            alone = model(torch.tensor([[begin]])).logits[0, 0]
            torch.testing.assert_close(packed.logits[0, index], alone)
            assert batch["labels"][0, index + 1] == documents[number][0]


def test_the_beginning_is_the_tokenizers_own_where_it_has_one():
    tokenizer = train_tokenizer(TEXTS, 300)
    assert begin_of(tokenizer) == tokenizer.eos_token_id
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    assert begin_of(tokenizer) == tokenizer.convert_tokens_to_ids("<s>") != tokenizer.eos_token_id


def test_scored_documents():
    tokenizer = train_tokenizer(TEXTS, 300)
    ids = tokenizer(TEXTS)["input_ids"]
    end = tokenizer.eos_token_id
    documents, num_bytes = scored_documents(["", *TEXTS], tokenizer)
    assert [document.tolist() for document in documents] == [[end, *row, end] for row in ids]
    assert num_bytes == sum(map(len, TEXTS))
    targets = len(ids[0]) + 1 + 3
    documents, num_bytes = scored_documents(TEXTS, tokenizer, targets)
    assert sum(len(document) - 1 for document in documents) == targets
    assert documents[1].tolist() == [end, *ids[1][:3]]
    assert num_bytes == len(TEXTS[0]) + len(tokenizer.decode(ids[1][:3]))
    with pytest.raises(ValueError, match="no text to score"):
        scored_documents([""], tokenizer)


def test_files_of_every_kind(tmp_path):
    (tmp_path / "a.txt").write_text(TEXTS[0] + "\n\nstill the same document", encoding="utf-8")
    (tmp_path / "b.txt").write_text(TEXTS[1], encoding="utf-8")
    documents = documents_of_files([f"{tmp_path}/*.txt"])
    assert list(documents["text"]) == [TEXTS[0] + "\n\nstill the same document", TEXTS[1]]
    write_lines(tmp_path / "c.jsonl", [{"text": text} for text in TEXTS])
    assert list(documents_of_files([f"{tmp_path}/c.jsonl"])["text"]) == TEXTS
    documents.to_parquet(tmp_path / "d.parquet")
    assert len(documents_of_files([f"{tmp_path}/d.parquet"])) == 2
    with pytest.raises(ValueError, match="one kind"):
        documents_of_files([f"{tmp_path}/a.txt", f"{tmp_path}/c.jsonl"])
    with pytest.raises(FileNotFoundError, match="nothing here"):
        documents_of_files([f"{tmp_path}/nothing here*"])


def test_files_may_have_columns_of_their_own(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"title": "A", "text": "one"}\n', encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "two", "year": 1900}\n{"text": "three", "year": 1901}\n', "utf-8")
    documents = documents_of_files([f"{tmp_path}/*.jsonl"])
    assert list(documents["text"]) == ["one", "two", "three"] and list(documents["year"]) == [None, 1900, 1901]
    (tmp_path / "c.jsonl").write_text('{"text": "four"}\n{"text": 4\n', encoding="utf-8")
    for files in (["c"], ["a", "c"]):
        with pytest.raises(ValueError, match=r"c\.jsonl"):
            documents_of_files([f"{tmp_path}/{name}.jsonl" for name in files])


@pytest.mark.parametrize("streaming", [False, True])
def test_from_a_file_to_rows(tmp_path, streaming):
    path = write_lines(tmp_path / "texts.jsonl", [{"words": text, "n": 1} for text in TEXTS])
    data = DataArguments([path], text_column="words", streaming=streaming, sequence_length=8)
    train, validation = load_documents(data)
    assert validation is None
    tokenizer = get_tokenizer(data, train)
    rows = list(packed_rows(train, tokenizer, data))
    assert set(rows[0]) == {"input_ids", "labels", "position_ids", "continues"} | ({"row"} if streaming else set())
    tokens = [token for row in rows for token in row["input_ids"]]
    text = tokenizer.decode(tokens)
    assert text.startswith(tokenizer.eos_token.join(["", *TEXTS, ""]))


@pytest.fixture
def numbered(tmp_path):
    """Four files of ten documents, each of a word of its own; and a tokenizer."""
    texts = [f"{chr(ord('a') + n // 26)}{chr(ord('a') + n % 26)} " * 7 for n in range(40)]
    for file in range(4):
        write_lines(tmp_path / f"{file}.jsonl", [{"text": text} for text in texts[10 * file : 10 * file + 10]])
    return f"{tmp_path}/*.jsonl", train_tokenizer(texts, 300), texts


def stream(numbered, seed, **options):
    data = DataArguments([numbered[0]], sequence_length=16, streaming=True, **options)
    return packed_rows(load_documents(data)[0], numbered[1], data, seed)


def test_a_stream_is_shuffled_by_its_seed(numbered):
    in_order = list(stream(numbered, None))
    size = len(in_order)
    assert len(in_order) > 10 and [row["row"] for row in in_order] == list(range(size))

    def order(seed, count=size, **options):
        return [tuple(row["input_ids"]) for row in islice(stream(numbered, seed, **options), count)]

    plain = [tuple(row["input_ids"]) for row in in_order]
    first = order(0)
    assert first != plain and first == order(0) != order(1)
    both = order(0, 2 * size, shuffle_buffer=8)  # a second pass, in an order of its own
    assert both[:size] != both[size:]
    assert order(0, shuffle_buffer=1) == plain
    words = Counter(token for row in both[:size] for token in row)
    assert words == Counter(token for row in plain for token in row)
    assert [tuple(row["input_ids"]) for row in stream(numbered, None).take(3)] == plain[:3]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_share_a_stream(numbered, workers):
    """Every document once a pass, whoever reads it; rows have numbers of their own; a limit is one for all."""
    rows = list(torch.utils.data.DataLoader(stream(numbered, None), batch_size=None, num_workers=workers))
    rows.sort(key=lambda row: (row["row"] % workers, row["row"]))
    text = numbered[1].decode([token for row in rows for token in row["input_ids"]])
    assert all(text.count(each) == 1 for each in numbered[2])
    assert len({row["row"] for row in rows}) == len(rows)
    limited = torch.utils.data.DataLoader(stream(numbered, None).take(4), batch_size=None, num_workers=workers)
    assert len(list(limited)) == 4


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 12), st.integers(0, 99))
def test_shuffling_loses_nothing(rows, size, seed):
    found = list(shuffled(iter(range(rows)), size, np.random.default_rng(seed)))
    assert sorted(found) == list(range(rows))
    assert all(row < place + size for place, row in enumerate(found))
    assert size > 1 or found == list(range(rows))


def test_rest_of_a_group_is_carried_on():
    """Many short documents fill their rows: padding is at the very end alone."""
    texts = Dataset.from_dict({"text": ["short text"] * 1000})
    tokenizer = train_tokenizer(TEXTS, 300)
    data = DataArguments(["(given)"], sequence_length=1024)
    rows = packed_rows(texts, tokenizer, data)
    tokens = 1000 * (1 + len(tokenizer("short text")["input_ids"]))
    assert len(rows) == -(-tokens // 1024)
    data.preprocessing_workers = 2
    assert len(packed_rows(texts, tokenizer, data)) == 2 * -(-tokens // 2 // 1024)


def test_workers_keep_the_order_of_documents(numbered):
    """Each cuts a piece of the documents: the rows' text is that of the documents, in their order."""
    data = DataArguments([numbered[0]], sequence_length=16)
    documents = load_documents(data)[0]
    texts = []
    for data.preprocessing_workers in (1, 2):
        rows = packed_rows(documents, numbered[1], data)
        texts.append(numbered[1].decode([token for row in rows for token in row["input_ids"]]))
    places = [[text.index(each) for each in numbered[2]] for text in texts]
    assert all(found == sorted(found) for found in places)


def test_rows_held_out_and_their_limit(numbered):
    data = DataArguments([numbered[0]], sequence_length=16, validation_fraction=0.5, max_validation_rows=2)
    rows = packed_rows(load_documents(data)[0], numbered[1], data)
    train, validation = split_rows(rows, None, data)
    assert len(train) + round(len(rows) / 2) == len(rows) and len(validation) == 2
    assert validation[0] == rows[len(train)]
    train, validation = split_rows(stream(numbered, 0), stream(numbered, None), data)
    assert len(list(validation)) == 2
    with pytest.raises(ValueError, match="needs validation_files"):
        split_rows(stream(numbered, 0), None, data)
    with pytest.raises(ValueError, match="1 rows are too few"):
        split_rows(rows.select([0]), None, data)


def test_tokenizer_knows_every_text(tmp_path):
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.save_pretrained(tmp_path)
    loaded = type(tokenizer).from_pretrained(tmp_path)
    for text in ("naïve — 你好", TEXTS[1]):
        assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.eos_token_id is not None


def test_missing_text_column(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"body": "x"}])
    with pytest.raises(ValueError, match="body"):
        load_documents(DataArguments([f"{tmp_path}/a.jsonl"]))
