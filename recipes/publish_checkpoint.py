"""Make a folder to share of a trained run.

It gets bfloat16 weights, code, held-out figures, plots, a card and hashes.

    python recipes/publish_checkpoint.py run=RUN folder=FOLDER config=FILE --held_out novels=A.jsonl tales=B.jsonl

RUN is the output folder of pretrain_clm.py, pretrain_mlm.py or pretrain_seq2seq.py. The figures are measured with
the weights that are written, computed in float32; a golden text and logits go into golden.json, so that a test can
tell when a later version reads the weights differently.
"""

import hashlib
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from _lib.documents import begin_of, documents_of_files, paths_of, token_ids
from _lib.entry import guarded, parsed
from _lib.masking import MaskingCollator, SpanCorruption, TokenMasking, text_length
from _lib.plotting import perplexity_by_length
from _lib.scoring import scored_documents, sliding_loss
from _lib.training import perplexity, save_figure, say_figures, write_json

import torch
import torch.nn.functional as F
from evaluate_lm import extrapolation
from pretrain_seq2seq import chunks
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import hf_hybrid_ssm  # noqa: F401 - registers the families
from hf_hybrid_ssm.hub import card_of_folder, check_folder, export_code
from hf_hybrid_ssm.hub.reading import read_json
from hf_hybrid_ssm.hub.writing import write_whole
from hf_hybrid_ssm.models import FAMILIES

SUMS = "SHA256SUMS"
# not taught to converse: the messages follow each other as paragraphs, and the model goes on
# What was said, and nothing else: these models continue text. What stands between the generation tags is what TRL's
# `assistant_only_loss` trains; a line break as text after a tag would be dropped.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\\n\\n' }}{% endfor %}"
)
DATA = (
    "novels and tales of Standard Ebooks (public domain in the USA; the editions CC0 1.0) and OpenStax textbooks (CC "
    "BY 4.0: College Success, Introduction to Anthropology, Introduction to Business, Introduction to Intellectual "
    "Property, Life, Liberty, and the Pursuit of Happiness, Physics, Principles of Economics)"
)


EVERY = 64  # of the vocabulary's logits that golden.json keeps
MEAN_SPAN = 3.0
NEW_TOKENS = 32  # of a language model's golden text
ROWS = 16  # of corrupted text that are scored at a time


class CausalObjective:
    """Every token given those before it, in windows that overlap by half."""

    recipe, auto_class = "pretrain_clm.py", AutoModelForCausalLM

    def figures(self, model: PreTrainedModel, tokenizer: Any, texts: list[str], length: int, limit: int) -> dict:
        documents, num_bytes = scored_documents(texts, tokenizer, limit)
        tokens = sum(len(document) - 1 for document in documents)
        loss = sliding_loss(model, documents, length, length // 2)
        return losses(loss) | {"bits_per_byte": loss * tokens / num_bytes / math.log(2)}

    def golden(self, model: PreTrainedModel, tokenizer: Any, prompt: str) -> dict[str, Any]:
        """Greedy text after the prompt, and logits after its last token."""
        ids = torch.tensor([[begin_of(tokenizer), *token_ids([prompt], tokenizer)[0]]])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        return known(prompt, ids, tokenizer.decode(output[0, ids.shape[1] :]), model(ids).logits[0, -1])


class CorruptedText:
    """Rows of text of which a collator hides a share."""

    def __init__(self, noise: float = 0.15):
        self.noise = noise

    def collator(self, tokenizer: PreTrainedTokenizerBase, length: int) -> tuple[MaskingCollator, int]:
        """It, and the tokens of a row before it is corrupted."""
        raise NotImplementedError

    @torch.inference_mode()
    def figures(self, model: PreTrainedModel, tokenizer: Any, texts: list[str], length: int, limit: int) -> dict:
        """Of the hidden tokens (with their sentinels, where there are some); the same tokens are hidden every time."""
        collator, length = self.collator(tokenizer, length)
        cut = chunks(token_ids(texts, tokenizer), length, tokenizer.eos_token_id)
        rows = [row | {"row": number} for number, row in enumerate(itertools.islice(cut, max(1, limit // length)))]
        total, count = 0.0, 0
        for first in range(0, len(rows), ROWS):
            batch = collator(rows[first : first + ROWS])
            logits, labels = model(**batch).logits, batch["labels"]
            total += F.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), reduction="sum").item()
            count += int((labels != -100).sum())
        return losses(total / count)


class MaskedObjective(CorruptedText):
    recipe, auto_class = "pretrain_mlm.py", AutoModelForMaskedLM

    def collator(self, tokenizer, length):
        return TokenMasking(tokenizer, self.noise), length

    def golden(self, model: PreTrainedModel, tokenizer: Any, prompt: str) -> dict[str, Any]:
        """What is likeliest in the place of the prompt's last word, and its logits."""
        text = f"{prompt.rsplit(' ', 1)[0]}{tokenizer.mask_token} the door."
        ids = torch.tensor(token_ids([text], tokenizer))
        logits = model(ids).logits[ids == tokenizer.mask_token_id][0]
        return known(text, ids, tokenizer.decode([logits.argmax()]), logits)


class SpanObjective(CorruptedText):
    recipe, auto_class = "pretrain_seq2seq.py", AutoModelForSeq2SeqLM

    def collator(self, tokenizer, length):
        noise = (self.noise, MEAN_SPAN)
        length, _ = text_length(length, *noise)
        return SpanCorruption(tokenizer, length, *noise), length

    def golden(self, model: PreTrainedModel, tokenizer: Any, prompt: str) -> dict[str, Any]:
        """The likeliest spans for what is hidden of the prompt, and the logits of the first token."""
        ids = token_ids([prompt], tokenizer)[0]
        batch = SpanCorruption(tokenizer, len(ids), self.noise, MEAN_SPAN)([{"input_ids": ids, "row": 0}])
        inputs = batch["input_ids"]
        output = model.generate(inputs, attention_mask=batch["attention_mask"], max_new_tokens=24, do_sample=False)
        start = torch.tensor([[model.config.decoder_start_token_id]])
        logits = model(inputs, decoder_input_ids=start).logits[0, -1]
        return known(tokenizer.decode(inputs[0]), inputs, tokenizer.decode(output[0]), logits)


Objective: TypeAlias = CausalObjective | MaskedObjective | SpanObjective
OBJECTIVES: dict[str, Callable[[float], Objective]] = {
    "ForCausalLM": lambda noise: CausalObjective(),
    "ForMaskedLM": MaskedObjective,
    "ForConditionalGeneration": SpanObjective,
}


def objective_of(folder: Any, noise: float = 0.15) -> Objective:
    """What the folder's model was trained to do; `noise` is the share of the tokens that it restores.

    Raises:
        ValueError: the folder's model has none of the heads that the pre-training recipes train.
    """
    name = (AutoConfig.from_pretrained(folder).architectures or [""])[0]
    for ending, objective in OBJECTIVES.items():
        if name.endswith(ending):
            return objective(noise)
    raise ValueError(f"{folder}: architectures is {name!r}, which should end with one of {', '.join(OBJECTIVES)}.")


def losses(loss: float) -> dict[str, float]:
    return {"loss": loss, "perplexity": perplexity(loss)}


def known(prompt: str, ids: torch.Tensor, text: str, logits: torch.Tensor) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "input_ids": ids[0].tolist(),
        "greedy": text,
        f"every_{EVERY}th_logit": logits[::EVERY].tolist(),
    }


def held_out_texts(pairs: Iterable[str]) -> dict[str, str]:
    """NAME=FILE → the file of each name.

    Raises:
        ValueError: another form.
    """
    pairs = list(pairs)
    if wrong := [pair for pair in pairs if not all(pair.partition("="))]:
        raise ValueError(f"held_out: {wrong[0]!r} must have the form NAME=FILE.")
    return dict(pair.split("=", 1) for pair in pairs)


@dataclass
class PublishArguments:
    run: str = field(metadata={"help": "output folder of a recipe"})
    folder: str = field(metadata={"help": "where the checkpoint goes; must not exist"})
    config: str = field(metadata={"help": "the recipe's settings, named in the card"})
    held_out: list[str] = field(metadata={"help": "NAME=FILE: held-out text, whole documents"})
    prompt: str = field(default="The old man looked at", metadata={"help": "continued in the card and golden.json"})
    max_tokens: int = field(default=60_000, metadata={"help": "of each held-out file, from its start"})
    length: int = field(default=512, metadata={"help": "the training length"})
    noise: float = field(default=0.15, metadata={"help": "the share of the tokens to restore, if any"})
    with_code: bool = field(default=True, metadata={"help": "add the code that loads it without this package"})


def measured(
    model: PreTrainedModel, tokenizer: Any, objective: Any, arguments: PublishArguments
) -> tuple[dict[str, float], list]:
    """Per text: loss in nats per token, perplexity, and bits per byte; for language models also the perplexity of the
    first text in windows of growing length."""
    figures: dict[str, float] = {}
    curve: list = []
    for name, path in held_out_texts(arguments.held_out).items():
        texts = list(documents_of_files([path])["text"])
        found = objective.figures(model, tokenizer, texts, arguments.length, arguments.max_tokens)
        figures |= {f"{name}_{what}": value for what, value in found.items()}
        if isinstance(objective, CausalObjective) and not curve:
            documents, _ = scored_documents(texts, tokenizer, arguments.max_tokens)
            curve = extrapolation(model, documents, arguments.length, [1, 2, 4, 8, 16])
    return figures, curve


def write_sums(folder: Path) -> None:
    """SHA-256 of every file, as `sha256sum --check` reads it."""
    files = sorted(path for path in folder.iterdir() if path.name != SUMS)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    write_whole(folder / SUMS, "".join(lines))


def peer_card(name: str, model: PreTrainedModel, results: dict[str, Any], recipe: str) -> str:
    """Of a model of transformers that was trained beside ours."""
    rows = "\n".join(f"| {key.replace('_', ' ')} | {value:.4g} |" for key, value in results.items())
    return (
        f"---\nlicense: apache-2.0\nlibrary_name: transformers\n---\n\n# {name}\n\n`{type(model).__name__}` of "
        "transformers, trained beside the checkpoints of hf-hybrid-ssm on the same tokens, for comparison.\n\n"
        f"## Training\n\nData: {DATA}. Command: `{recipe}`.\n\n| metric | value |\n| --- | ---: |\n{rows}\n"
    )


def publish(arguments: PublishArguments) -> dict[str, Any]:
    run, folder = Path(arguments.run), Path(arguments.folder)
    if folder.exists():
        raise ValueError(f"folder={arguments.folder!r} exists; a published checkpoint is written once.")
    check_folder(run)
    paths_of(held_out_texts(arguments.held_out).values())
    objective = objective_of(run, arguments.noise)
    tokenizer = AutoTokenizer.from_pretrained(run)
    model = objective.auto_class.from_pretrained(run, dtype=torch.bfloat16)
    ours = model.config.model_type in {family.model_type for family in FAMILIES}
    if isinstance(objective, CausalObjective):  # greedy text of small models repeats itself
        model.generation_config.update(do_sample=True, temperature=0.8, top_p=0.95)
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.padding_side = "left"  # rows of a batch go on from their ends
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if (folder / "tokenizer.json").is_file():  # again, on one line: less than half the size
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    if ours and arguments.with_code:
        export_code(folder)
    model = objective.auto_class.from_pretrained(folder, dtype=torch.float32).eval()
    figures, curve = measured(model, tokenizer, objective, arguments)
    with torch.inference_mode():
        known = objective.golden(model, tokenizer, arguments.prompt)
    results = trained_results(run) | figures
    by_length = {"perplexity_by_length": {str(point["length"]): point["perplexity"] for point in curve}}
    write_json(folder / "results.json", results | (by_length if curve else {}))
    write_json(folder / "golden.json", known)
    shutil.copy(run / "loss.png", folder / "loss.png")
    if curve:
        question = "Does perplexity stay low in longer windows?"
        figure = perplexity_by_length(question, {folder.name: curve}, arguments.length)
        save_figure(figure, folder / "extrapolation.png")
    recipe = f"python recipes/{objective.recipe} {arguments.config}"
    if ours:
        card = card_of_folder(folder, dataset=DATA, recipe=recipe, license="apache-2.0")
    else:
        card = peer_card(folder.name, model, results, recipe)
    (folder / "README.md").write_text(card + sample_section(folder, known, tokenizer), encoding="utf-8")
    write_sums(folder)
    return results


def trained_results(run: Path) -> dict[str, Any]:
    """What the recipe measured while it trained, without what depends on the machine."""
    kept = ["parameters", "parameters_beside_embeddings", "steps", "tokens", "text_tokens", "train_loss"]
    found, reads = read_json(run / "results.json"), "validation_loss_with_other_inputs"
    if reads in found:  # does the decoder read its encoder?
        kept += ["validation_loss", reads]
    return {key: value for key, value in found.items() if key in kept}


def sample_section(folder: Path, known: dict[str, Any], tokenizer: Any) -> str:
    """What the golden values show, and for a language model the lines that write it again."""
    plots = {"loss.png": "loss while training", "extrapolation.png": "perplexity by evaluation context length"}
    shown = "\n".join(f"![{text}]({name})" for name, text in plots.items() if (folder / name).is_file())
    prompt, written = known["prompt"], " ".join(known["greedy"].split("\n"))
    if "<" in prompt:  # a mask or a sentinel
        return f"\n## What it restores\n\n`{prompt}`: `{written}`\n\n{shown}\n"
    name = "eos_token" if tokenizer.bos_token is None else "bos_token"
    token = getattr(tokenizer, name)
    return (
        f'\n## What it writes\n\nGreedy, in float32, after "{prompt}" at the beginning of a document, which is the '
        f"token `{token}` (the tokenizer does not add it):\n\n> {prompt}{written}\n\n"
        f"```python\ntext = tokenizer.{name} + {json.dumps(prompt)}\n"
        'inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)\n'
        f"output = model.float().generate(**inputs, max_new_tokens={NEW_TOKENS}, do_sample=False)\n"
        "print(tokenizer.decode(output[0], skip_special_tokens=True))\n```\n\n"
        f"{shown}\n"
    )


if __name__ == "__main__":
    guarded(
        "publish_checkpoint.py",
        lambda: say_figures(publish(parsed(PublishArguments))),
    )
