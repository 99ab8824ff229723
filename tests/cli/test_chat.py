"""Chat templates in `hf-hybrid-ssm generate` and `chat`: what is asked, streamed, remembered, and said when it is
empty."""

import io
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hybrid_ssm.cli import chat, main
from hf_hybrid_ssm.serving.prefix_cache import VARIABLE, PrefixCache, of_process
from tests.cli.folders import TEXT, save_checkpoint
from tests.tiny_models import language_model
from tests.upcycle.test_upcycle import teacher_of

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SHORT = ["--max-new-tokens", "7"]


def add_template(folder, template=TEMPLATE):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    torch.manual_seed(0)
    return add_template(save_checkpoint(tmp_path_factory.mktemp("chat") / "longhorn"))


@pytest.fixture
def silent(talking, copy):
    """It can choose no token but the one that ends a text."""
    add_template(copy)
    file = copy / "generation_config.json"
    fields = json.loads(file.read_text())
    others = [token for token in range(290) if token != fields["eos_token_id"]]
    file.write_text(json.dumps(fields | {"suppress_tokens": others}))
    return copy


def answer_of(folder, asked, count=7):
    """Greedy, to a text or to messages, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    if isinstance(asked, str):
        ids = tokenizer(asked, return_tensors="pt")["input_ids"]
    else:
        text = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True)


def conversation(folder, *lines, system=None):
    """What is answered to each line after those before it."""
    messages, answers = [] if system is None else [{"role": "system", "content": system}], []
    for line in lines:
        messages.append({"role": "user", "content": line})
        answers.append(answer_of(folder, messages))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def talk(monkeypatch, capsys, folder, *options, lines, status=0):
    """What `chat` prints when the lines are its input."""
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    assert main(["chat", str(folder), *SHORT, *options]) == status
    return capsys.readouterr()


def answers_of(monkeypatch, capsys, folder, *options, lines):
    said = talk(monkeypatch, capsys, folder, "--json", *options, lines=lines).out
    return [json.loads(line)["text"] for line in said.splitlines()]


# -- generate ---------------------------------------------------------------------------------------------------------


def test_generate_uses_the_chat_template_unless_it_is_raw(talking, capsys):
    in_template, as_it_is = answer_of(talking, [{"role": "user", "content": TEXT}]), answer_of(talking, TEXT)
    assert in_template != as_it_is
    for options, expected in (([], in_template), (["--raw"], as_it_is)):
        assert main(["generate", str(talking), *SHORT, *options, TEXT]) == 0
        assert capsys.readouterr().out == expected + "\n"


def test_the_prompt_is_an_argument_an_option_or_the_input(checkpoint, capsys, monkeypatch):
    said = []
    for arguments in ([TEXT], ["--prompt", TEXT], []):
        monkeypatch.setattr("sys.stdin", io.StringIO(TEXT + "\n"))
        assert main(["generate", *SHORT, str(checkpoint), *arguments]) == 0
        said.append(capsys.readouterr().out)
    assert said == [answer_of(checkpoint, TEXT) + "\n"] * 3
    with pytest.raises(SystemExit, match="2"):
        main(["generate", str(checkpoint), TEXT, "--prompt", TEXT])
    assert "TEXT and --prompt are the same: give one of them" in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [False, True])
def test_an_empty_answer_says_why(silent, as_json, capsys):
    for options, advice in (([], "Give other words, or draw tokens by --sample."), (["--raw"], "Leave out --raw")):
        assert main(["generate", str(silent), TEXT, *options, *(["--json"] if as_json else [])]) == 0
        said = capsys.readouterr()
        assert f"the answer is empty: the first token that the model chose ends a text. {advice}" in said.err
        if as_json:
            found = json.loads(said.out)
            assert (found["text"], found["new_tokens"], found["finish_reason"]) == ("", 1, "stop")


def test_an_answer_that_the_limit_cut_says_so_and_is_not_called_empty(talking, capsys):
    assert main(["generate", str(talking), TEXT, "--max-new-tokens", "2", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["finish_reason"] == "length" and "empty" not in said.err


@pytest.mark.parametrize("template", ["{{ raise_exception('only users') }}", "{% for %}", "{{ messages + 1 }}"])
def test_a_template_that_cannot_be_used_is_one_line(template, copy, capsys):
    add_template(copy, template)
    for command in (["generate", str(copy), TEXT], ["generate", str(copy), TEXT, "--json"]):
        assert main(command) == 1
        said = capsys.readouterr()
        assert said.out == "" and "the chat template of the tokenizer cannot be used: " in said.err
        assert said.err.count("\n") == 1
    assert main(["generate", str(copy), TEXT, "--raw", *SHORT]) == 0


# -- chat -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", [None, "ten nine eight"])
def test_every_answer_follows_all_that_was_said(system, talking, monkeypatch, capsys):
    lines = ["one two", "three", "four five six"]
    expected = conversation(talking, *lines, system=system)
    assert expected[1:] != [conversation(talking, line, system=system)[0] for line in lines[1:]]
    options = [] if system is None else ["--system", system]
    assert answers_of(monkeypatch, capsys, talking, *options, lines=lines) == expected
    said = talk(monkeypatch, capsys, talking, *options, lines=lines)
    assert said.out == "".join(f"{answer}\n" for answer in expected)
    assert "--max-new-tokens allows more" in said.err


def test_words_that_are_no_message(talking, monkeypatch, capsys):
    """A new conversation knows nothing of the one before; what follows the end is not read."""
    lines = ["one two", "", "!clear", "  three ", "!exit", "four"]
    expected = [*conversation(talking, "one two"), *conversation(talking, "three")]
    assert answers_of(monkeypatch, capsys, talking, lines=lines) == expected


def test_answers_are_printed_while_they_are_generated(talking, monkeypatch, capsys):
    printed = []

    def embeds(module, given):
        if isinstance(module, torch.nn.Embedding):
            printed.append(capsys.readouterr().out)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(embeds)
    try:
        drawn = ["--max-new-tokens", "60", "--temperature", "3", "--seed", "0"]  # with spaces, where words are printed
        talk(monkeypatch, capsys, talking, *drawn, lines=[TEXT])
    finally:
        hook.remove()
    assert sum(map(bool, printed)) > 1  # letters appeared between two tokens


def test_a_turn_reads_what_is_new(talking, monkeypatch, capsys):
    lines = ["one two three four five six seven", "eight nine", "ten"]
    monkeypatch.setenv(VARIABLE, str(2**20 + 7))
    found = answers_of(monkeypatch, capsys, talking, lines=lines)
    tokenizer = AutoTokenizer.from_pretrained(talking)
    first = tokenizer.apply_chat_template([{"role": "user", "content": lines[0]}], add_generation_prompt=True)
    assert of_process().tokens_reused >= 2 * (len(first["input_ids"]) - 1)
    monkeypatch.setenv(VARIABLE, "0")
    assert answers_of(monkeypatch, capsys, talking, lines=lines) == found


def test_whose_states_are_kept(monkeypatch):
    model = language_model("longhorn")
    monkeypatch.delenv(VARIABLE, raising=False)
    (cache,) = chat.prefix_cache_of(model).values()
    assert isinstance(cache, PrefixCache)
    monkeypatch.setenv(VARIABLE, "12345")
    assert chat.prefix_cache_of(model) == {"prefix_cache": of_process()} and of_process().max_bytes == 12345
    assert chat.prefix_cache_of(teacher_of("llama")) == {}  # from the Hub: `generate` of transformers knows none
    monkeypatch.setenv(VARIABLE, "0")
    assert chat.prefix_cache_of(model) == {}


def test_a_silent_model_says_so(silent, monkeypatch, capsys):
    said = talk(monkeypatch, capsys, silent, lines=["one", "two"])
    assert said.out == "\n\n" and said.err.count("the answer is empty: the first token") == 2


def test_what_cannot_talk_is_refused(checkpoint, tmp_path, monkeypatch, capsys):
    for folder in (checkpoint, add_template(save_checkpoint(tmp_path / "seq2seq", "encoder-decoder"))):
        said = talk(monkeypatch, capsys, folder, lines=["one"], status=1)
        assert "`hf-hybrid-ssm generate FOLDER TEXT` continues a text" in said.err and said.out == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_an_answer_is_stopped_by_hand(talking, monkeypatch, capsys):
    """In a terminal the conversation goes on without it; elsewhere the command ends."""
    answered, stops = chat.answered, [True]

    def stopped_once(*given, **options):
        if stops.pop():
            stops.append(False)
            raise KeyboardInterrupt
        stops.append(False)
        return answered(*given, **options)

    monkeypatch.setattr(chat, "answered", stopped_once)
    assert talk(monkeypatch, capsys, talking, lines=["one", "two"], status=130).out == ""
    stops[:] = [True]
    asked = iter(["one", "two"])
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda prompt: next(asked, "!exit"))
    assert main(["chat", str(talking), *SHORT]) == 0
    said = capsys.readouterr()
    assert said.out == conversation(talking, "two")[0] + "\n" and "are forgotten" in said.err
