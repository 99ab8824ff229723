"""What recipes share. Importing it before torch, as every recipe does, lets torch's threads wait without spinning.
After torch, as timings do, it would do so for the processes alone that this one starts."""

import sys

from hf_hybrid_ssm.cli.threads import share_processors

if "torch" not in sys.modules:
    share_processors()
