"""The equations of every mixer, token by token in float64, from its parameters alone and without the package's ops.

`equation(mixer)(u)` maps one document (L, D) to (L, D); a two-sided mixer sees the whole document.
"""

import math

import torch

from hf_hybrid_ssm.layers.mixers.base import Mixer
from hf_hybrid_ssm.layers.mixers.ema import EMA
from hf_hybrid_ssm.layers.mixers.hyena import Hyena, ImplicitLongConv
from hf_hybrid_ssm.layers.mixers.lstm import LSTM
from hf_hybrid_ssm.layers.mixers.s4 import S4
from hf_hybrid_ssm.layers.mixers.s4d import S4D
from hf_hybrid_ssm.layers.mixers.s5 import S5
from tests.layers.shown_mixer import LeakyAverage


def equation(mixer: Mixer):
    functions = {
        S4: _state_space,
        S4D: _state_space,
        S5: _s5,
        EMA: _ema,
        ImplicitLongConv: _unstructured,
        Hyena: _hyena,
        LSTM: _lstm,
        LeakyAverage: _leaky_average,
    }
    function = functions[type(mixer)]
    parameters = {name: value.detach().double() for name, value in mixer.named_parameters()}
    return lambda u: function(mixer, parameters, u.double())


def _complex(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(value.contiguous())


def discrete_system(mixer: S4 | S4D, p: dict, system: int):
    """Abar, Bbar, C (over all N conjugate dimensions) of one of the F D systems, by solving the defining equations."""
    copy = system % mixer.num_dynamics
    half = torch.complex(-torch.exp(p["A_log_real"][copy]), p["A_imag"][copy])
    eigenvalues = torch.cat([half, half.conj()])
    b = _complex(p["B"])[copy]
    b = torch.cat([b, b.conj()])
    a = torch.diag(eigenvalues)
    if isinstance(mixer, S4):
        low = _complex(p["P"])[copy]
        low = torch.cat([low, low.conj()])
        a = a - torch.outer(low, low.conj())
    dt = torch.exp(p["log_dt"].flatten()[system])
    eye = torch.eye(len(a), dtype=a.dtype)
    if isinstance(mixer, S4D) and mixer.discretization == "zoh":
        return torch.diag(torch.exp(dt * eigenvalues)), (torch.exp(dt * eigenvalues) - 1) / eigenvalues * b
    left = eye - dt / 2 * a
    return torch.linalg.solve(left, eye + dt / 2 * a), torch.linalg.solve(left, dt * b)


def _state_space(mixer: S4 | S4D, p: dict, u: torch.Tensor) -> torch.Tensor:
    channels, filters = mixer.hidden_size, mixer.num_filters or 1
    y = torch.zeros(u.shape[0], filters * channels, dtype=torch.float64)
    for system in range(filters * channels):
        a, b = discrete_system(mixer, p, system)
        for direction in range(2 if mixer.bidirectional else 1):
            c = _complex(p["C"]).reshape(-1, filters * channels, mixer.state_size // 2)[direction, system]
            c = torch.cat([c, c.conj()])
            x = u[:, system % channels]
            state = torch.zeros_like(b)
            if direction == 0:
                for t in range(len(x)):
                    state = a @ state + b * x[t]
                    y[t, system] += (c @ state).real
            else:  # the token itself does not enter
                for t in reversed(range(len(x) - 1)):
                    state = a @ state + b * x[t + 1]
                    y[t, system] += (c @ state).real
    y = y.view(-1, filters, channels) + p["D"] * u.unsqueeze(1)
    return y if mixer.num_filters else y.squeeze(1)


def _s5(mixer: S5, p: dict, u: torch.Tensor) -> torch.Tensor:
    eigenvalues = torch.complex(p["A_real"], p["A_imag"])
    decay = torch.exp(torch.exp(p["log_dt"]) * eigenvalues)
    b = ((decay - 1) / eigenvalues).unsqueeze(1) * _complex(p["B"])
    c = _complex(p["C"]).unflatten(0, (-1, mixer.num_filters or 1))
    y = p["D"] * u.unsqueeze(1)
    for direction in range(len(c)):
        state = torch.zeros_like(decay)
        order = range(len(u)) if direction == 0 else reversed(range(len(u)))
        for t in order:
            state = decay * state + b @ u[t].to(b.dtype)
            y[t] = y[t] + 2 * (c[direction] @ state).real
    return y if mixer.num_filters else y.squeeze(1)


def _ema(mixer: EMA, p: dict, u: torch.Tensor) -> torch.Tensor:
    y = p["omega"] * u
    for direction in range(2 if mixer.bidirectional else 1):
        damp, move = torch.sigmoid(p["alpha"][direction]), torch.sigmoid(p["delta"][direction])
        state = torch.zeros_like(damp)
        order = range(len(u)) if direction == 0 else reversed(range(len(u)))
        for t in order:
            state = (1 - move * damp) * state + move * p["beta"][direction] * u[t].unsqueeze(-1)
            y[t] = y[t] + (p["gamma"][direction] * state).sum(-1) / math.sqrt(mixer.state_size)
    return torch.nn.functional.silu(y)


def _leaky_average(mixer: Mixer, p: dict, u: torch.Tensor) -> torch.Tensor:
    keep, y = torch.sigmoid(p["w"]), torch.zeros_like(u)
    for t in range(len(u)):
        y[t] = (1 - keep) * u[t] + (keep * y[t - 1] if t else 0)
    return y


def _taps(mixer: ImplicitLongConv, p: dict) -> torch.Tensor:
    """(directions, F, D, Lf), one tap at a time."""
    length, bands = mixer.filter_length, (mixer.filter_emb - 1) // 2
    taps = []
    for k in range(length):
        t = k / (length - 1)
        f = [1e-4 + i * (bands - 1 - 1e-4) / max(bands - 1, 1) for i in range(bands)]
        angle = 2 * math.pi * k / length
        x = torch.tensor(
            [t] + [math.cos(fi * angle) for fi in f] + [-math.sin(fi * angle) for fi in f], dtype=torch.float64
        )
        x = torch.sin(p["freq"] * (p["ffn_in"] @ x + p["ffn_in_bias"]))
        for weight, bias in zip(p["ffn"], p["ffn_bias"]):
            x = torch.sin(p["freq"] * (weight @ x + bias))
        low, high = math.log(100) / 1.5, math.log(100) / 0.3
        alpha = torch.tensor(
            [low + c * (high - low) / max(mixer.hidden_size - 1, 1) for c in range(mixer.hidden_size)],
            dtype=torch.float64,
        )
        h = (p["ffn_out"] @ x).view(-1, mixer.num_filters or 1, mixer.hidden_size)
        taps.append(h * torch.exp(-alpha * t))
    return torch.stack(taps, dim=-1)


def _unstructured(mixer: ImplicitLongConv, p: dict, u: torch.Tensor) -> torch.Tensor:
    taps = _taps(mixer, p)
    y = p["D"] * u.unsqueeze(1)
    for t in range(len(u)):
        for j in range(len(u)):
            if 0 <= t - j < mixer.filter_length:
                y[t] = y[t] + taps[0, ..., t - j] * u[j]
            if mixer.bidirectional and 0 <= j - t < mixer.filter_length:
                y[t] = y[t] + taps[1, ..., j - t] * u[j]
    return y if mixer.num_filters else y.squeeze(1)


def _hyena(mixer: Hyena, p: dict, u: torch.Tensor) -> torch.Tensor:
    x = u @ p["in_proj.weight"].T + p["in_proj.bias"]
    padded = torch.cat([x.new_zeros(2, x.shape[1]), x, x.new_zeros(1, x.shape[1])])
    lags = (0, 1, -1) if mixer.bidirectional else (0, 1, 2)
    mixed = p["short_bias"] + sum(
        p["short_weight"][:, i] * padded[2 - lag : 2 - lag + len(x)] for i, lag in enumerate(lags)
    )
    p0, p1, v = mixed.chunk(3, dim=-1)
    inner = {name.removeprefix("filter."): value for name, value in p.items() if name.startswith("filter.")}
    return (p0 * _unstructured(mixer.filter, inner, p1 * v)) @ p["out_proj.weight"].T + p["out_proj.bias"]


def _lstm(mixer: LSTM, p: dict, u: torch.Tensor) -> torch.Tensor:
    outputs = []
    for suffix in ("", "_reverse") if mixer.bidirectional else ("",):
        weights = [p[f"rnn.{kind}_l0{suffix}"] for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        h = torch.zeros(weights[1].shape[1], dtype=torch.float64)
        c, states = h, []
        for token in u.flip(0) if suffix else u:
            gates = weights[0] @ token + weights[2] + weights[1] @ h + weights[3]
            i, f, g, o = gates.chunk(4)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        y = torch.stack(states)
        outputs.append(y.flip(0) if suffix else y)
    return torch.cat(outputs, dim=-1)
