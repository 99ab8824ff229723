"""What recipes share. Importing it before torch, as every recipe does, lets torch's threads wait without spinning."""

from hf_hybrid_ssm.cli.threads import share_processors

share_processors()
