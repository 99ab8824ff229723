"""The cards in model_cards/: one for each language model or encoder-decoder of a paper, and an index.

The sizes that a paper runs through (the ladder of LMU-ISA) share a card with a table.

python tools/model_cards.py
"""

import re
from pathlib import Path

import transformers
import yaml

import hf_hybrid_ssm
from hf_hybrid_ssm.hub import model_card
from hf_hybrid_ssm.models import FAMILIES

ROOT = Path(__file__).parents[1]
# presets without a card: tasks of the Long Range Arena, sizes that the paper does not have, and its baselines
NO_CARD = re.compile("-lra-|-rule|-deep|-slide|-block-recurrent")
LADDERS = {"lmu_isa"}  # model types whose presets are sizes of one model
SCRIPTS = {"lra": "lra.py", "seq2seq": "pretrain_seq2seq.py", "wikitext103": "word_lm.py"}


def preset_cards() -> dict[str, str]:
    """File name → card of every preset that has one, and README.md, which lists them."""
    recipes = recipes_of_presets()
    cards: dict[str, str] = {}
    lines = ["| card | family | parameters |", "| --- | --- | ---: |"]
    for family in FAMILIES:
        configuration, kind = getattr(hf_hybrid_ssm, family.config), family.model_type.replace("_", "-")
        presets = [preset for preset in configuration.presets if not NO_CARD.search(preset)]
        names = [preset if preset.startswith(family.folder) else f"{kind}-{preset}" for preset in presets]
        found = {}
        for name, preset in zip(names, presets):
            command, fields = recipes.get((family.model_type, preset), (None, {}))
            found[name] = model_card(configuration.preset(preset, **fields), name=name, recipe=command)
        counts = [_counts(card)[0] for card in found.values()]
        if family.model_type in LADDERS:
            commands = [
                recipes[family.model_type, preset][0] for preset in presets if (family.model_type, preset) in recipes
            ]
            found = {
                kind: ladder(kind, [configuration.preset(preset) for preset in presets], presets, found, commands)
            }
            counts = [f"{counts[0]} to {counts[-1]}"]
        cards |= {f"{name}.md": card for name, card in found.items()}
        assert family.card is not None
        lines += [f"| [{name}]({name}.md) | {family.card.name} | {count} |" for name, count in zip(found, counts)]
    index = "\n".join(lines)
    cards["README.md"] = (
        "# Model cards\n\nOne for each language model and encoder-decoder of a paper, written by "
        "`python -m tests.reporting cards`. **No trained weights of these sizes are published yet.** The cards "
        'describe the models and say how to train them. Configurations: `LonghornConfig.preset("125m")`; `.presets` '
        "of a configuration class lists all. "
        "`python -m hf_hybrid_ssm card FOLDER` writes the card of a trained model.\n\n"
        f"{index}\n"
    )
    return cards


def ladder(name: str, configs: list, presets: list[str], cards: dict[str, str], commands: list[str]) -> str:
    """One card of several sizes of a model: a table in place of what is said of one architecture and its training."""
    fields = [key for key in configs[-1].to_dict() if len({str(getattr(config, key)) for config in configs}) > 1]
    rows = ["| preset | parameters | non-embedding | " + " | ".join(f"`{key}`" for key in fields) + " |"]
    rows.append("| --- |" + " ---: |" * (2 + len(fields)))
    for preset, config, card in zip(presets, configs, cards.values()):
        values = (preset, *_counts(card), *(getattr(config, key) for key in fields))
        rows.append("| " + " | ".join(map(str, values)) + " |")
    training = f"No trained weights are published yet. Commands: {', '.join(f'`{command}`' for command in commands)}."
    table = "\n".join(rows)
    architecture = (
        f"`{configs[-1].__class__.__name__}.preset(...)`, with {configs[-1].num_hidden_layers} layers:\n\n{table}"
    )
    before, _, rest = list(cards.values())[-1].partition("## Architecture\n")
    limits = rest[rest.index("## Limits") :]
    card = f"{before}## Architecture\n\n{architecture}\n\n## Training\n\n{training}\n\n{limits}"
    return card.replace(list(cards)[-1], name)


def _counts(card: str) -> tuple[str, str]:
    """Parameters, and those that are not embeddings, as a card says them."""
    return re.search(r"([\d,]+) parameters, ([\d,]+) of them", card).groups()  # type: ignore[return-value, union-attr]


def recipes_of_presets() -> dict[tuple[str, str], tuple[str, dict]]:
    """(model type, preset) → the command that trains it and the fields that it sets beside the preset, from the
    recipes' configurations of the papers' sizes."""
    found = {}
    for path in sorted(ROOT.glob("recipes/configs/*/*.yaml")):
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(settings, dict) and "preset" in settings and not path.stem.endswith("_cpu"):
            script = SCRIPTS.get(path.stem) or SCRIPTS.get(path.parent.name, "pretrain_clm.py")
            command = f"python recipes/{script} {path.relative_to(ROOT).as_posix()}"
            found[settings["model_type"], settings["preset"]] = command, settings.get("config") or {}
    return found


def main() -> None:
    transformers.logging.set_verbosity_error()
    for name, text in preset_cards().items():
        (ROOT / "model_cards" / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
