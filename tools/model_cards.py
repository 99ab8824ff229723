"""The cards in model_cards/: one for each language model or encoder-decoder of a paper, and an index.

python tools/model_cards.py
"""

import re
from pathlib import Path

import transformers
import yaml

import hf_hybrid_ssm
from hf_hybrid_ssm.auto import FAMILIES
from hf_hybrid_ssm.hub import model_card

ROOT = Path(__file__).parents[1]
# presets without a card: tasks of the Long Range Arena, and sizes that the paper does not have
NO_CARD = re.compile("-lra-|-rule|-deep")
SCRIPTS = {"lra": "lra.py", "seq2seq": "pretrain_seq2seq.py", "wikitext103": "word_lm.py"}


def preset_cards() -> dict[str, str]:
    """File name → card of every preset that has one, and README.md, which lists them."""
    recipes = recipes_of_presets()
    cards, lines = {}, ["| card | family | parameters |", "| --- | --- | ---: |"]
    for family in FAMILIES:
        configuration = getattr(hf_hybrid_ssm, family.config)
        for preset in configuration.presets:
            if NO_CARD.search(preset):
                continue
            name = preset if preset.startswith(family.folder) else f"{family.model_type.replace('_', '-')}-{preset}"
            card = model_card(configuration.preset(preset), name=name, recipe=recipes.get((family.model_type, preset)))
            cards[f"{name}.md"] = card
            count = re.search(r"([\d,]+) parameters", card)[1]  # type: ignore[index]
            lines.append(f"| [{name}]({name}.md) | {family.card.name} | {count} |")
    index = "\n".join(lines)
    citations = "\n\n".join(dict.fromkeys(family.card.citation for family in FAMILIES))
    cards["README.md"] = (
        "# Model cards\n\nOne for each language model and encoder-decoder of a paper, written by `make cards`. "
        "**No trained weights are published yet**; the cards say what would be in them, and how to "
        'train it. Configurations: `LonghornConfig.preset("125m")`; `.presets` of a configuration class lists all.\n\n'
        f"{index}\n\n## Citations\n\n```bibtex\n{citations}\n```\n"
    )
    return cards


def recipes_of_presets() -> dict[tuple[str, str], str]:
    """(model type, preset) → the command that trains it, from the recipes' configurations of the papers' sizes."""
    found = {}
    for path in sorted(ROOT.glob("recipes/configs/*/*.yaml")):
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(settings, dict) and "preset" in settings and not path.stem.endswith("_cpu"):
            script = SCRIPTS.get(path.stem) or SCRIPTS.get(path.parent.name, "pretrain_clm.py")
            command = f"python recipes/{script} {path.relative_to(ROOT).as_posix()}"
            found[settings["model_type"], settings["preset"]] = command
    return found


def main() -> None:
    transformers.logging.set_verbosity_error()
    for name, text in preset_cards().items():
        (ROOT / "model_cards" / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
