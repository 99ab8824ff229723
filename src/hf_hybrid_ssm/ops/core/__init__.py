"""What the ops share: dispatch, checks, packing, builds."""
