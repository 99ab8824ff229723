"""A Longhorn layer in a module of your own: a detector that reads a signal as it comes, in constant memory.

The signal is noise with a rare pulse; at each moment the model says how many pulses there have been.

python examples/longhorn_layer.py --steps 300
"""

import argparse

import torch
from torch import nn

from hf_hybrid_ssm.layers import Longhorn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()


class Counter(nn.Module):
    """Signals (B, L, 2) → counts (B, L)."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.enter, self.leave = nn.Linear(2, width), nn.Linear(width, 1)
        self.norm, self.longhorn = nn.LayerNorm(width), Longhorn(width, state_size=8)

    def forward(self, signal, state=None):
        x = self.enter(signal)
        y, state = self.longhorn(self.norm(x), state, return_state=True)
        return self.leave(x + y).squeeze(-1), state


def signals(rows, length):
    pulses = (torch.rand(rows, length) < 0.05).float()
    return torch.stack([pulses, torch.randn(rows, length)], -1), pulses.cumsum(1)


torch.manual_seed(0)
model = Counter()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(args.steps):
    signal, counts = signals(16, 128)
    loss = nn.functional.mse_loss(model(signal)[0], counts)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: mean squared error {loss:.3f}")

with torch.inference_mode():
    signal, counts = signals(1, 128)
    whole, state = model.eval()(signal)[0], None
    for moment in range(128):  # the same, moment by moment
        count, state = model(signal[:, moment : moment + 1], state)
        torch.testing.assert_close(count[:, 0], whole[:, moment], rtol=1e-3, atol=1e-3)
print(f"{float(counts[0, -1]):.0f} pulses, the model says {float(count):.1f}")
