"""The Longhorn recurrence in chunks of four tokens, on matrix products, in float64 with all its gradients.

What the kernels of `ops/longhorn_scan/triton_chunk_kernels.py` and `triton_chunk_summary_kernels.py` compute, in the
same order and under the same names, without tiles: here it can be read, and is compared with autograd through the
recurrence.
"""

import math

import pytest
import torch
from torch.overrides import TorchFunctionMode

T = 4
SUBSETS = range(2**T)  # of a chunk's tokens: token t belongs to f if its bit t is set
HEAP = range(2 ** (T + 1))  # entry 2^(t + 1) + S: token t reads out what the tokens S, none of them later, did


def members(subset: int) -> list[int]:
    return [t for t in range(T) if subset >> t & 1]


def product(subset: int, rows: torch.Tensor) -> torch.Tensor:
    return rows[members(subset)].prod(0)


def of_heap(entry: int) -> tuple[int, int]:
    """Token and subset."""
    token = entry.bit_length() - 2
    return token, entry - 2 ** (token + 1)


def membership(kind: str) -> torch.Tensor:
    """(T, 16) or (T, 32) of zeros and ones: what sums a row of subsets up to tokens."""
    first = {f: min(members(f), default=-1) for f in SUBSETS}
    rules = {
        "holds": [[t in members(f) for f in SUBSETS] for t in range(T)],
        "first": [[t == first[f] for f in SUBSETS] for t in range(T)],
        "later": [[t in members(f) and t != first[f] for f in SUBSETS] for t in range(T)],
        "reads": [[r >= 2 and of_heap(r)[0] == t for r in HEAP] for t in range(T)],
        "heap holds": [[r >= 2 and t in members(of_heap(r)[1]) for r in HEAP] for t in range(T)],
    }
    return torch.tensor(rules[kind], dtype=torch.float64)


def first_row(subset: int, rows: torch.Tensor) -> torch.Tensor:
    """That of the first token of a subset, 0 of none."""
    return rows[members(subset)[0]] if subset else 0 * rows[0]


def read_out(rows: torch.Tensor) -> torch.Tensor:
    """Of each entry of the heap the row of the token that reads it out, 0 of the first two."""
    return torch.stack([rows[of_heap(r)[0]] if r >= 2 else 0 * rows[0] for r in HEAP])


def heap_products(rows: torch.Tensor) -> torch.Tensor:
    return torch.stack([product(of_heap(r)[1], rows) if r >= 2 else 0 * rows[0] for r in HEAP])


def tables(k, q, keep):
    """P, U, W (16, N) and R (32, N) of what all channels share, and what the ends of documents cut off."""
    minus = -(k**2)
    P = torch.stack([product(f, minus) for f in SUBSETS])
    U = torch.stack([product(f & (f - 1), minus) for f in SUBSETS])  # without the first token
    W = U * torch.stack([first_row(f, k) for f in SUBSETS])
    kept = keep.cumprod(0)  # whether the state that enters reaches a token
    R = heap_products(minus) * read_out(q * kept[:, None])
    number = torch.cat((keep[:1] * 0, (1 - keep[1:]).cumsum(0)))  # of documents that began since the first token
    first_number = torch.stack([first_row(f, number) for f in SUBSETS])
    reaches = [[0 < f < 2 ** (t + 1) and first_number[f] == number[t] for f in SUBSETS] for t in range(T)]
    return P, U, W, R, kept, (first_number == number[-1]).double()[:, None], torch.tensor(reaches).double()


def channels(delta, x):
    """A, F (16, D) and A of the heap (32, D)."""
    A = torch.stack([product(f, delta) if f else 0 * delta[0] for f in SUBSETS])
    return A, A * torch.stack([first_row(f, x) for f in SUBSETS]), heap_products(delta)


def forward(h, x, delta, k, q, keep):
    """h (N, D), x and delta (T, D), k and q (T, N), keep (T,) → y (T, D), h after the chunk, and what is left of h."""
    P, _, W, R, kept, lasts, reaches = tables(k, q, keep)
    A, F, heap = channels(delta, x)
    y = membership("reads") @ (heap * (R @ h)) + (reaches * (q @ W.T)) @ F
    left = kept[-1] * (1 + P.T @ A)
    return y, left * h + (W * lasts).T @ F, left


def backward(h, x, delta, k, q, keep, gy, g):
    """Gradients of h, x, k, q, and that of delta times delta, from those of y and of the state after the chunk.

    A product of delta is linear in each of them, so that delta_t ddelta_t sums A_S dA_S of the subsets with t.
    """
    P, U, W, R, kept, lasts, reaches = tables(k, q, keep)
    A, F, heap = channels(delta, x)
    B = heap * read_out(gy)
    G = reaches * (q @ W.T)
    through = kept[-1] * g
    dM, Z = through * h, R @ h
    dh = through + (P.T @ A) * through + R.T @ B
    dF = (W * lasts) @ g + G.T @ gy
    ddelta = membership("holds") @ (A * (P @ dM) + F * dF) + membership("heap holds") @ (B * Z)
    dx = membership("first") @ (A * dF)
    dP, dR, dG = A @ dM.T, B @ h.T, reaches * (gy @ F.T)
    dW = (F @ g.T) * lasts + dG.T @ q
    dq = kept[:, None] * (membership("reads") @ (heap_products(-(k**2)) * dR)) + dG @ W
    squares = membership("holds") @ (P * dP) + membership("later") @ (W * dW) + membership("heap holds") @ (R * dR)
    dk = membership("first") @ (U * dW) + torch.where(k == 0, 0, 2 * squares / k)
    return dh, dx, ddelta, dk, dq


def recurrence(h, x, delta, k, q, keep):
    y = []
    for t in range(T):
        h = keep[t] * h
        h = h + k[t][:, None] * delta[t] * (x[t] - k[t][:, None] * h)
        y.append(q[t] @ h)
    return torch.stack(y), h


@pytest.mark.parametrize("size", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("keep", [(1, 1, 1, 1), (0, 1, 1, 1), (1, 1, 0, 1), (1, 0, 1, 0)], ids=str)
def test_a_chunk_is_the_recurrence(keep, size):
    random = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    D, N = 5, 6
    h, x, k, q, gy, g = draw(N, D), draw(T, D), size * draw(T, N), draw(T, N), draw(T, D), draw(N, D)
    k[1, 2] = 0.0
    keep = torch.tensor(keep, dtype=torch.float64)
    delta = 1 / (1 + torch.exp(draw(T, D)) + (k**2).sum(1, keepdim=True))
    leaves = [t.requires_grad_() for t in (h, x, delta, k, q)]
    y, last = recurrence(*leaves, keep)
    left = keep.prod() * (1 - k[:, :, None] ** 2 * delta[:, None]).prod(0)
    torch.testing.assert_close(forward(*leaves, keep), (y, last, left), rtol=1e-12, atol=1e-13)
    want = list(torch.autograd.grad((y * gy).sum() + (last * g).sum(), leaves))
    want[2] = want[2] * delta
    got = backward(*(t.detach() for t in leaves), keep, gy, g)
    atol = 1e-12 * math.ceil(size**4)
    for name, one, other in zip(("h", "x", "delta", "k", "q"), got, want):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


class ElevenBits(TorchFunctionMode):
    """Rounds what is multiplied as matrices to the eleven bits of tf32."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        if function in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__):
            arguments = tuple(self.rounded(t) for t in arguments)
        return function(*arguments, **(options or {}))

    @staticmethod
    def rounded(values):
        mantissa, exponent = torch.frexp(values)
        return torch.ldexp((mantissa * 2**11).round(), exponent - 11)


@pytest.mark.parametrize("size", [0.3, 1.0, 5.0])
def test_eleven_bits_keep_what_16_bits_hold(size):
    """Over 64 tokens: less than bfloat16 itself rounds away, which is 4e-3 of a number."""
    random = torch.Generator().manual_seed(1)
    D, N, chunks = 24, 32, 16
    shapes = ((D,), (D,), (N,), (N,), (D,))
    x, logit, k, q, gy = (torch.randn(chunks, T, *s, generator=random, dtype=torch.float64) for s in shapes)
    k = k * size
    delta = 1 / (1 + torch.exp(logit) + (k**2).sum(-1, keepdim=True))
    scale = (k**2).sum(-1, keepdim=True).clamp(min=1.0).rsqrt()  # as the kernel, which leaves no product too large
    leaves = [t.requires_grad_() for t in (scale * x, delta / scale**2, scale * k, q)]
    keep, states, ys = torch.ones(T, dtype=torch.float64), [torch.zeros(N, D, dtype=torch.float64)], []
    start = states[0].requires_grad_()
    for c in range(chunks):
        y, after = recurrence(states[-1], *(t[c] for t in leaves), keep)
        states.append(after)
        ys.append(y)
    want = list(torch.autograd.grad((torch.stack(ys) * gy).sum(), [*leaves, start]))
    want[1] = want[1] * leaves[1]
    grad, found, state, left = torch.zeros_like(states[0]), [], states[0], torch.ones_like(states[0])
    with torch.no_grad(), ElevenBits():
        for c in range(chunks):  # as the first pass over a row that is cut
            _, state, decay = forward(state, *(t[c] for t in leaves), keep)
            left = left * decay
        for c in reversed(range(chunks)):
            grad, *rest = backward(states[c], *(t[c] for t in leaves), keep, gy[c], grad)
            found.insert(0, rest)
    decays = (1 - leaves[2].detach()[..., None] ** 2 * leaves[1].detach()[:, :, None]).flatten(0, 1).prod(0)
    named = [("state", state, states[-1]), ("decay", left, decays), ("gradient of the state", grad, want.pop())]
    named += zip(("x", "delta", "k", "q"), map(torch.stack, zip(*found)), want)
    for name, got, expected in named:
        error = float((got - expected.detach()).abs().max() / expected.detach().abs().max())
        assert 0 < error < 2e-3, f"{name}: {error:.1e}"
