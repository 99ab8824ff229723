"""What recipes look at before a run starts: each wrong thing is named."""

import pytest
from _lib.checks import (
    check_checkpoint,
    check_labels,
    check_output,
    check_scores,
    check_texts,
    check_vocabulary,
    clear_checkpoints,
)
from _lib.documents import DataArguments, documents_of_files, load_documents, token_ids, train_tokenizer
from datasets import Dataset
from evaluate_lm import EvaluationArguments, evaluate
from finetune_glue import GlueArguments, glue
from finetune_summarization import SummarizationArguments, summarize
from per_token_loss import PerTokenArguments, per_token_loss, rows_of
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)

import hf_hybrid_ssm  # noqa: F401 - registers the families


def test_output_folder(tmp_path):
    for fine in (tmp_path / "new", tmp_path):
        check_output(fine, overwrite=False)
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "results.json").write_text("{}")
    check_output(tmp_path, overwrite=False, resume="auto")
    with pytest.raises(FileExistsError, match="overwrite=true"):
        check_output(tmp_path, overwrite=False)
    assert (tmp_path / "checkpoint-20").exists()
    check_output(tmp_path, overwrite=True)
    assert (tmp_path / "checkpoint-20").exists()  # nothing goes before everything has been read
    for kept in ({"overwrite": False}, {"overwrite": True, "resume": "auto"}):
        clear_checkpoints(tmp_path, **kept)
        assert (tmp_path / "checkpoint-20").exists()
    clear_checkpoints(tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_checkpoint(tmp_path):
    for missing in (str(tmp_path), "./nowhere"):
        with pytest.raises(FileNotFoundError, match=r"model_name_or_path.*(config\.json|no such folder)"):
            check_checkpoint(missing, "model_name_or_path")
    AutoConfig.for_model("longhorn").save_pretrained(tmp_path)
    for auto_class in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        assert check_checkpoint(str(tmp_path), "model", auto_class).model_type == "longhorn"
    with pytest.raises(ValueError, match="family 'longhorn', which AutoModelForSeq2SeqLM"):
        check_checkpoint(str(tmp_path), "model", AutoModelForSeq2SeqLM)


def test_vocabulary_and_labels():
    tokenizer = train_tokenizer(["some text"], 260)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "state_size": 2}
    for size in (len(tokenizer), len(tokenizer) - 1):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("longhorn", vocab_size=size, **sizes))
        if size == len(tokenizer):
            check_vocabulary(model, tokenizer)
        else:
            with pytest.raises(ValueError, match=f"vocab_size={size}"):
                check_vocabulary(model, tokenizer)
    check_labels([0, 2, 1], 3, "train")
    for labels in ([0, 3], [-1, 0]):
        with pytest.raises(ValueError, match="validation: labels run from"):
            check_labels(labels, 3, "validation")


def test_recipes_refuse_what_they_cannot_load(tmp_path):
    (tmp_path / "spade").mkdir()
    AutoConfig.for_model("spade").save_pretrained(tmp_path / "spade")
    (tmp_path / "texts.jsonl").write_text('{"document": "a", "summary": "b"}\n')
    files = [str(tmp_path / "texts.jsonl")]
    arguments = SummarizationArguments(files, files, model_name_or_path=str(tmp_path / "spade"))
    with pytest.raises(ValueError, match="family 'spade'"):
        summarize(arguments, Seq2SeqTrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to="none"))
    AutoConfig.for_model("mamba").save_pretrained(tmp_path / "mamba")
    with pytest.raises(ValueError, match="family 'mamba'"):
        glue(GlueArguments(model_name_or_path=str(tmp_path / "mamba")), TrainingArguments(str(tmp_path / "out")))
    files = {"files": [str(tmp_path / "texts.jsonl")]}
    AutoConfig.for_model("spade_seq2seq").save_pretrained(tmp_path / "seq2seq")
    with pytest.raises(ValueError, match=r"columns \['text'\]"):
        evaluate(EvaluationArguments("anything", **files))
    with pytest.raises(ValueError, match="family 'spade_seq2seq'"):
        evaluate(EvaluationArguments(str(tmp_path / "seq2seq"), text_column="summary", **files))
    with pytest.raises(ValueError, match="family 'spade_seq2seq'"):
        PerTokenArguments({"a": [str(tmp_path / "seq2seq")]}, **files)
    with pytest.raises(ValueError, match=r"columns \['text'\]"):
        rows_of(PerTokenArguments({}, **files), train_tokenizer(["a"], 260))
    with pytest.raises(FileExistsError):
        per_token_loss(PerTokenArguments({}, output_dir=str(tmp_path), **files))
    with pytest.raises(FileExistsError):
        glue(GlueArguments(model_type="longhorn"), TrainingArguments(str(tmp_path)))


@pytest.mark.parametrize(
    "rows, message",
    [
        ({"text": ["a", None, "c"]}, "column 'text' holds null in row 1"),
        ({"text": [1, 2]}, "column 'text' holds int64, not texts"),
        ({"text": [["a"], ["b"]]}, "column 'text' holds .*, not texts"),
        ({"other": ["a"]}, r"columns \['text'\] are not among"),
    ],
)
def test_texts_are_texts(rows, message, tmp_path):
    rows = Dataset.from_dict(rows)
    with pytest.raises(ValueError, match=f"^here: {message}"):
        check_texts(rows, ["text"], "here")
    path = tmp_path / "rows.jsonl"
    rows.to_json(path)
    with pytest.raises(ValueError, match=message):
        load_documents(DataArguments(train_files=[str(path)]))
    check_texts(Dataset.from_dict({"text": ["", "a"]}), ["text"], "here")


def test_streamed_texts_are_looked_at_as_they_come():
    tokenizer = train_tokenizer(["some text"], 260)
    with pytest.raises(ValueError, match="row 1 of 2 read together holds None"):
        token_ids(["some", None], tokenizer)


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl"])
def test_an_empty_file_is_named(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=f"{name}.*every file is empty"):
        documents_of_files([str(tmp_path / name)])


@pytest.mark.parametrize("labels", [["positive", "negative"], [0.5, 1.0], [True, False], [None, 1]])
def test_class_labels_are_integers(labels):
    with pytest.raises(ValueError, match=f"sst2 train: labels must be class numbers 0 to 1, got {labels[0]!r}"):
        check_labels(labels, 2, "sst2 train")


def test_scores_are_numbers():
    check_scores([0, 1.5, 5.0], "stsb train")
    with pytest.raises(ValueError, match="stsb train: labels must be numbers, got 'high'"):
        check_scores([1.0, "high"], "stsb train")
