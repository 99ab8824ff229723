"""`hf-hybrid-ssm-eval`: lm-eval's own command line, with the families of this package registered."""

import hf_hybrid_ssm  # noqa: F401 - registers the families


def main() -> None:
    """Hand everything to lm-eval; `hf-hybrid-ssm-eval --help` shows its options."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise SystemExit("lm-eval is needed: pip install 'hf-hybrid-ssm[eval]'.") from error
    cli_evaluate()


if __name__ == "__main__":
    main()
