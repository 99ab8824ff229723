"""What the recipes share: text and rows, settings, training, scoring. The scripts next to this folder are run."""
