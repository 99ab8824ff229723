"""Write the model card of a saved model, FOLDER/README.md, from the folder's own files.

The card has the Hub's metadata. A README.md that is there stays as it is, unless --overwrite is given. No code of the
folder is executed.

Examples:
    hf-hybrid-ssm card FOLDER
    hf-hybrid-ssm card FOLDER --dataset "novels of Project Gutenberg" --license apache-2.0
    hf-hybrid-ssm card FOLDER --stdout
"""

import argparse
import json
import os
from pathlib import Path

from hf_hybrid_ssm.cli.next_command import next_command
from hf_hybrid_ssm.cli.parsing import add_json, check_holds_model, parser_of


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("card", __doc__)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder of a saved model")
    parser.add_argument("--dataset", metavar="TEXT", help="data that the model was trained and validated on")
    parser.add_argument("--recipe", metavar="COMMAND", help="command that trained the model")
    parser.add_argument(
        "--license", metavar="NAME", help="license of the weights, as the Hub calls it, such as apache-2.0"
    )
    parser.add_argument(
        "--base-model", metavar="NAME", help="model that the weights come from (default: what the folder says)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a README.md that is there")
    parser.add_argument("--stdout", action="store_true", help="print the card instead of writing it")
    add_json(parser)
    return parser


def main(arguments: list[str]) -> int:
    parser = build_parser()
    args = parser.parse_args(arguments)
    if args.stdout and args.json:
        parser.error("--stdout prints the card, and --json where it was written: give one of them")
    check_holds_model(args.folder)
    import transformers

    from hf_hybrid_ssm.hub import card_of_folder
    from hf_hybrid_ssm.hub.writing import write_whole

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        told = {name: getattr(args, name) for name in ("dataset", "recipe", "license", "base_model")}
        card = card_of_folder(args.folder, **{name: value for name, value in told.items() if value is not None})
    finally:
        transformers.logging.set_verbosity(verbosity)
    if args.stdout:
        print(card)
        return 0
    target = args.folder / "README.md"
    if os.path.lexists(target) and not args.overwrite and not _says(target, card):
        raise FileExistsError(f"{target} is there and says something else: --overwrite replaces it, --stdout prints.")
    write_whole(target, card)
    if args.json:
        print(json.dumps({"file": str(target)}))
        return 0
    print(f"wrote {target}\n{next_command('check', args.folder, '--values')}")
    return 0


def _says(file: Path, card: str) -> bool:
    from hf_hybrid_ssm.hub.reading import read_bytes

    try:
        return read_bytes(file).decode("utf-8", "replace") == card
    except ValueError:  # a link that leads elsewhere, or no regular file
        return False
