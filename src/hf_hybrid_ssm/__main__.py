"""`python -m hf_hybrid_ssm COMMAND ...`: the command line where the command itself is not on the path."""

import sys

from hf_hybrid_ssm.cli import main

if __name__ == "__main__":
    sys.exit(main())
