"""What hypothesis draws for the invariances: partitions, lengths and orders."""

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

SETTINGS = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))

lengths = st.integers(1, 40)
cuts = st.lists(st.integers(1, 39), max_size=6)
row_lengths = st.lists(st.integers(1, 20), min_size=1, max_size=3)
sides = st.sampled_from(["left", "right", "both"])
orders = st.permutations(range(3)).map(torch.tensor)
seeds = st.integers(0, 2**16)
