"""Add to a saved checkpoint the code that loads it without this package, by `trust_remote_code=True`.

The folder gets at most 15 Python files and the entries of `config.json` that name them; weights are not touched.
"""

from hf_hybrid_ssm.cli.parsing import check_is_folder, parser_of


def main(arguments: list[str]) -> int:
    parser = parser_of("export", __doc__)
    parser.add_argument("folder", metavar="FOLDER", help="a saved model")
    given = parser.parse_args(arguments)
    check_is_folder(given.folder)
    from hf_hybrid_ssm.hub import check_folder, export_code

    files = check_folder(export_code(given.folder))["code"]
    print(f"{given.folder}: {files} code files")
    return 0
