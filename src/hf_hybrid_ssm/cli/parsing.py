"""What the commands' parsers share."""

import argparse


def parser_of(command: str, description: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with the docstring of the command's module, as it is written there."""
    return argparse.ArgumentParser(
        prog=f"hf-hybrid-ssm {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
