"""Make a folder to share of a trained run: bfloat16 weights, code, held-out figures, plots, a card and hashes.

    python recipes/publish_checkpoint.py RUN FOLDER --config CONFIG.yaml --held_out novels=A.jsonl tales=B.jsonl

`RUN` is the output folder of pretrain_clm.py, pretrain_mlm.py or pretrain_seq2seq.py. The figures are measured with
the weights that are written, computed in float32; a golden text and logits go into golden.json, so that a test can
tell when a later version reads the weights differently.
"""

import hashlib
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _lib.documents import begin_of, documents_of_files, token_ids
from _lib.plotting import perplexity_by_length
from _lib.scoring import scored_documents, sliding_loss
from _lib.training import perplexity, save_figure, write_json
from evaluate_lm import extrapolation
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedModel

import hf_hybrid_ssm  # noqa: F401 - registers the families
from hf_hybrid_ssm.auto import FAMILIES
from hf_hybrid_ssm.hub import card_of_folder, check_folder, export_code

SUMS = "SHA256SUMS"
DATA = (
    "novels and tales of Standard Ebooks (public domain in the USA; the editions CC0 1.0) and OpenStax textbooks (CC "
    "BY 4.0: College Success, Introduction to Anthropology, Introduction to Business, Introduction to Intellectual "
    "Property, Life, Liberty, and the Pursuit of Happiness, Physics, Principles of Economics)"
)


@dataclass
class PublishArguments:
    run: str = field(metadata={"help": "output folder of a recipe"})
    folder: str = field(metadata={"help": "where the checkpoint goes; must not exist"})
    config: str = field(metadata={"help": "the recipe's settings, named in the card"})
    held_out: list[str] = field(metadata={"help": "NAME=FILE: held-out text, whole documents"})
    prompt: str = field(default="The old man looked at", metadata={"help": "continued in the card and golden.json"})
    max_tokens: int = field(default=60_000, metadata={"help": "of each held-out file, from its start"})
    length: int = field(default=512, metadata={"help": "the training length"})


def measured(model: PreTrainedModel, tokenizer: Any, arguments: PublishArguments) -> tuple[dict[str, float], list]:
    """Per text: loss in nats per token, perplexity, bits per byte; and the loss in windows of growing length."""
    figures: dict[str, float] = {}
    curve: list = []
    for pair in arguments.held_out:
        name, _, path = pair.partition("=")
        texts = list(documents_of_files([path])["text"])
        documents, num_bytes = scored_documents(texts, tokenizer, arguments.max_tokens)
        tokens = sum(len(document) - 1 for document in documents)
        loss = sliding_loss(model, documents, arguments.length, arguments.length // 2)
        figures |= {
            f"{name}_loss": loss,
            f"{name}_perplexity": perplexity(loss),
            f"{name}_bits_per_byte": loss * tokens / num_bytes / math.log(2),
        }
        curve = curve or extrapolation(model, documents, arguments.length, [1, 2, 4, 8, 16])
    return figures, curve


@torch.inference_mode()
def golden(model: PreTrainedModel, tokenizer: Any, prompt: str) -> dict[str, Any]:
    """Greedy text after the prompt, and every 64th logit after its last token, in float32."""
    ids = torch.tensor([[begin_of(tokenizer), *token_ids([prompt], tokenizer)[0]]])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
    logits = model(ids).logits[0, -1, ::64]
    text = tokenizer.decode(output[0, ids.shape[1] :])
    return {"prompt": prompt, "input_ids": ids[0].tolist(), "greedy": text, "every_64th_logit": logits.tolist()}


def write_sums(folder: Path) -> None:
    """SHA-256 of every file, as `sha256sum --check` reads it."""
    files = sorted(path for path in folder.iterdir() if path.name != SUMS)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


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
    tokenizer = AutoTokenizer.from_pretrained(run)
    model = AutoModelForCausalLM.from_pretrained(run, dtype=torch.bfloat16)
    ours = model.config.model_type in {family.model_type for family in FAMILIES}
    model.generation_config.update(do_sample=True, temperature=0.8, top_p=0.95)  # greedy text of small models repeats
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if ours:
        export_code(folder)
    trained = check_results(run)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    figures, curve = measured(model, tokenizer, arguments)
    known = golden(model, tokenizer, arguments.prompt)
    results = trained | figures
    by_length = {str(point["length"]): point["perplexity"] for point in curve}
    write_json(folder / "results.json", results | {"perplexity_by_length": by_length})
    write_json(folder / "golden.json", known)
    question = "Does perplexity stay low in longer windows?"
    save_figure(perplexity_by_length(question, {folder.name: curve}, arguments.length), folder / "extrapolation.png")
    shutil.copy(run / "loss.png", folder / "loss.png")
    recipe = f"python recipes/pretrain_clm.py {arguments.config}"
    if ours:
        card = card_of_folder(folder, dataset=DATA, recipe=recipe)
    else:
        card = peer_card(folder.name, model, results, recipe)
    (folder / "README.md").write_text(card + sample_section(known), encoding="utf-8")
    write_sums(folder)
    return results


def check_results(run: Path) -> dict[str, Any]:
    """What the recipe measured while it trained, without what depends on the machine."""
    from hf_hybrid_ssm.hub.folder import read_json

    kept = ("parameters", "parameters_beside_embeddings", "steps", "tokens", "train_loss")
    return {key: value for key, value in read_json(run / "results.json").items() if key in kept}


def sample_section(known: dict[str, Any]) -> str:
    return (
        f'\n## What it writes\n\nGreedy, after "{known["prompt"]}":\n\n> {known["prompt"]}'
        f"{' '.join(known['greedy'].split(chr(10)))}\n\n![loss while training](loss.png)\n"
        "![perplexity by evaluation context length](extrapolation.png)\n"
    )


if __name__ == "__main__":
    print(publish(HfArgumentParser(PublishArguments).parse_args_into_dataclasses()[0]))
