"""Write FOLDER/README.md: the model card of a saved model, with the Hub's metadata, from the folder's own files."""

from pathlib import Path

from hf_hybrid_ssm.cli.parsing import parser_of


def main(arguments: list[str]) -> int:
    parser = parser_of("card", __doc__)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a saved model")
    parser.add_argument("--dataset", metavar="TEXT", help="what the model was trained and validated on")
    parser.add_argument("--recipe", metavar="COMMAND", help="the command that trained it")
    parser.add_argument("--stdout", action="store_true", help="print the card instead of writing it")
    given = parser.parse_args(arguments)
    import transformers

    from hf_hybrid_ssm.hub import card_of_folder

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        card = card_of_folder(given.folder, dataset=given.dataset, recipe=given.recipe)
    finally:
        transformers.logging.set_verbosity(verbosity)
    if given.stdout:
        print(card)
        return 0
    (given.folder / "README.md").write_text(card, encoding="utf-8")
    print(f"wrote {given.folder / 'README.md'}")
    return 0
