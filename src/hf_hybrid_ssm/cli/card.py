"""Write FOLDER/README.md: the model card of a saved model, with the Hub's metadata, from the folder's own files.

A README.md that is there stays as it is, unless --overwrite is given. No code of the folder is executed.
"""

import os
from pathlib import Path

from hf_hybrid_ssm.cli.parsing import check_is_folder, parser_of


def main(arguments: list[str]) -> int:
    parser = parser_of("card", __doc__)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a saved model")
    parser.add_argument("--dataset", metavar="TEXT", help="what the model was trained and validated on")
    parser.add_argument("--recipe", metavar="COMMAND", help="the command that trained it")
    parser.add_argument("--license", metavar="NAME", help="of the weights, as the Hub calls it (apache-2.0)")
    parser.add_argument("--base-model", metavar="NAME", help="what the weights come from, if the folder does not say")
    parser.add_argument("--overwrite", action="store_true", help="replace a README.md that is there")
    parser.add_argument("--stdout", action="store_true", help="print the card instead of writing it")
    given = parser.parse_args(arguments)
    check_is_folder(given.folder)
    import transformers

    from hf_hybrid_ssm.hub import card_of_folder
    from hf_hybrid_ssm.hub.writing import write_whole

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        told = {name: getattr(given, name) for name in ("dataset", "recipe", "license", "base_model")}
        card = card_of_folder(given.folder, **{name: value for name, value in told.items() if value is not None})
    finally:
        transformers.logging.set_verbosity(verbosity)
    if given.stdout:
        print(card)
        return 0
    target = given.folder / "README.md"
    if os.path.lexists(target) and not given.overwrite and not _says(target, card):
        raise FileExistsError(f"{target} is there and says something else: --overwrite replaces it, --stdout prints.")
    write_whole(target, card)
    print(f"wrote {target}")
    return 0


def _says(file: Path, card: str) -> bool:
    from hf_hybrid_ssm.hub.reading import read_bytes

    try:
        return read_bytes(file).decode("utf-8", "replace") == card
    except ValueError:  # a link that leads elsewhere, or no regular file
        return False
