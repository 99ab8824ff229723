"""Which sink a student's windows get: a constant one where a text says that it holds, else the text's first token."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_hybrid_ssm.students.initial import first_token_ids
from hf_hybrid_ssm.upcycle import Keep, Teacher, upcycle
from hf_hybrid_ssm.upcycle.divergence import text_of
from hf_hybrid_ssm.upcycle.student import constant_sinks
from tests.upcycle.test_upcycle import SIZES, teacher_of

REACH = 6  # keys before its own that a token sees
BEGIN = 0


@torch.no_grad()
def resting_teacher():
    """Every head of it rests on the token that begins all texts: in the channel of a head that turns the least, its
    key alone is large, and so is every query; its value is almost nothing."""
    torch.manual_seed(0)
    fields = SIZES | {"bos_token_id": BEGIN, "eos_token_id": None, "tie_word_embeddings": False}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    model = LlamaForCausalLM(LlamaConfig(**fields)).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    begins, always, size = 0, 1, model.config.head_dim
    slowest = torch.arange(size // 2 - 1, SIZES["hidden_size"], size)  # of each head of queries
    embedding = model.model.embed_tokens.weight
    embedding[:, begins], embedding[:, always] = 0.0, 1.0
    embedding[BEGIN] = 4.0 * torch.eye(SIZES["hidden_size"])[begins]
    for layer in model.model.layers:
        attention, shared = layer.self_attn, slowest[: SIZES["num_key_value_heads"]]
        attention.q_proj.weight[slowest], attention.k_proj.weight[shared] = 0.0, 0.0
        attention.q_proj.weight[slowest, always], attention.k_proj.weight[shared, begins] = 6.0, 6.0
        attention.v_proj.weight[:, begins] = 0.0
        for projection in (attention.o_proj, layer.mlp.down_proj):
            projection.weight *= 0.3
            projection.weight[[begins, always]] = 0.0
    return model


class BeginningTokenizer:
    """Begins every text with one token, as Llama's does."""

    bos_token_id = BEGIN
    all_special_ids = (BEGIN,)

    def get_vocab(self):
        return {}

    def __call__(self, text):
        return {"input_ids": [BEGIN, *(5 + ord(letter) % 80 for letter in text)]}


class ConversingTokenizer(BeginningTokenizer):
    """Begins no text with a token of its own, but conversations, as SmolLM2's does."""

    chat_template = "a user's message"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [BEGIN if letter == "^" else 5 + ord(letter) % 80 for letter in text]}

    def apply_chat_template(self, messages, tokenize):
        return "^" + messages[0]["content"]


class WritingTokenizer(ConversingTokenizer):
    """Begins neither."""

    chat_template = None


def texts(rows=8, length=60):
    ids = torch.randint(5, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.full((rows, 1), BEGIN), ids], 1)


def test_a_sink_is_made_of_what_texts_begin_with():
    for tokenizer in (BeginningTokenizer(), ConversingTokenizer()):
        assert first_token_ids(90, tokenizer).tolist() == [[BEGIN]]
    for tokenizer in (WritingTokenizer(), None):
        assert sorted(first_token_ids(90, tokenizer)[:, 0].tolist()) == list(range(90))
    assert first_token_ids(1000).shape == (256, 1) and torch.equal(first_token_ids(1000), first_token_ids(1000))


@pytest.mark.parametrize("tokenizer", [BeginningTokenizer(), ConversingTokenizer()])
@torch.no_grad()
def test_beyond_its_window_a_student_needs_the_sink(tokenizer):
    """Of a teacher that puts most of its attention on the first token, windows alone make something else."""
    teacher, ids, lost = Teacher(resting_teacher(), tokenizer), texts(), {}
    wanted = teacher.model(ids).logits.log_softmax(-1)
    for sink in ("constant", "first_token", None):
        model, _ = upcycle(teacher, Keep([], window=REACH), sink=sink)
        found = model(ids).logits.log_softmax(-1)
        torch.testing.assert_close(found[:, :REACH], wanted[:, :REACH], rtol=2e-5, atol=2e-5)
        lost[sink] = float((wanted.exp() * (wanted - found)).sum(-1)[:, REACH + 1 :].mean())
    assert lost["constant"] < 0.02 and lost["first_token"] < 0.02 and lost[None] > 1.0, lost


@pytest.mark.parametrize(("given", "sink"), [(BeginningTokenizer(), "constant"), (None, "first_token")])
def test_a_sink_that_does_not_hold_gives_way(given, sink):
    """Without a tokenizer a constant sink is the mean of tokens at random, of which no text begins with one here."""
    teacher = Teacher(resting_teacher(), given)
    student, report = upcycle(teacher, Keep([1], window=REACH), text=text_of(teacher, 8, 60))
    losses = (
        f"({report.sink.constant:.3f} nats a token, {report.sink.first_token:.3f} with the first token itself, over "
    )
    assert losses in str(report.sink) and report.sink.tokens == 8 * (60 - REACH - 2)
    assert (report.sink.constant > report.sink.first_token + 0.02) == (sink == "first_token")
    assert report.sink.sink == sink and {layer.sink for layer in student.config.plan.layers} == {None, sink}
    assert bool(constant_sinks(student)) == (sink == "constant") and str(report.sink) in str(report)
    assert bool([name for name in report.new if ".sink." in name]) == (sink == "constant")
    wanted, own = upcycle(teacher, Keep([1], window=REACH), sink=sink)
    assert own.sink is None and torch.equal(student(texts()).logits, wanted(texts()).logits)


@pytest.mark.parametrize("given", [BeginningTokenizer(), None])
def test_without_a_text_the_teacher_writes_one(given):
    """As long as it has positions, at most."""
    _, report = upcycle(Teacher(resting_teacher(), given), Keep([], window=REACH))
    assert report.sink.tokens == SIZES["max_position_embeddings"] - REACH - 2
    _, report = upcycle(Teacher(resting_teacher(), given), Keep([], window=126))
    assert report.sink is None  # no token beyond the window


def test_windows_without_constant_sinks_are_not_tested():
    for name, parts in (("llama", 1.0), ("gemma3", [1, 3])):
        _, report = upcycle(Teacher(teacher_of(name)), Keep(parts, window=REACH))
        assert report.sink is None
    _, report = upcycle(Teacher(teacher_of("llama")), Keep(0, window=REACH), sink=None)
    assert report.sink is None and not report.new
