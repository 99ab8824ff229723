"""Local attention, token by token: a softmax over the list of keys that a token may see."""

from typing import Any

import torch

from hf_hybrid_ssm.ops.core.self_check import draw
from hf_hybrid_ssm.ops.local_attention.inputs import AttentionInputs, StepInputs


def local_attention_reference(inputs: AttentionInputs) -> torch.Tensor:
    """See `hf_hybrid_ssm.ops.local_attention.local_attention`; computes in float32, or float64 for float64 inputs."""
    q, k, v, (left, right), scale, bias, sink_logits, sink_values, *_ = inputs
    chunk_size, softcap, state, two_sided = inputs.chunk_size, inputs.softcap, inputs.state, inputs.two_sided
    if inputs.dropout:
        raise ValueError("the reference has no dropout.")
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, heads, length, _ = q.shape
    shared = heads // k.shape[1]
    y = torch.zeros(batch, heads, length, v.shape[3], dtype=dtype)
    nothing = torch.zeros(heads, v.shape[3], dtype=dtype)
    sink_value = _sink_value(sink_values, nothing)
    for b in range(batch):
        seen = 0 if state is None else int(state.seen[b])
        count = 0 if state is None else min(seen, state.keys.shape[2])
        document = [0] * length if inputs.seq_idx is None else inputs.seq_idx[b].tolist()
        known = [(document[0] if length else 0, seen - count + s) for s in range(count)]  # (document, rank in it)
        queries, keys, values = _tokens(q[b], 1, dtype), _tokens(k[b], shared, dtype), _tokens(v[b], shared, dtype)
        if state is not None:
            first_slot = state.keys.shape[2] - count
            keys = _tokens(state.keys[b, :, first_slot:], shared, dtype) + keys
            values = _tokens(state.values[b, :, first_slot:], shared, dtype) + values
        for i in range(length if inputs.lengths is None else int(inputs.lengths[b])):
            first = document[i] == document[0]
            known.append((document[i], seen + i if first else i - document.index(document[i])))
        row = [nothing] * length
        for i in range(count, len(known)):
            logits, seen_values = [], []
            for j in range(len(known)):
                near = (left is None or i - j <= left) and (right is None or j - i <= right)
                same_chunk = chunk_size is None or known[i][1] // chunk_size == known[j][1] // chunk_size
                if near and same_chunk and known[i][0] == known[j][0]:
                    product = (queries[i - count] * keys[j]).sum(-1) * scale
                    product = product if softcap is None else softcap * (product / softcap).tanh()
                    logits.append(product + _bias(bias, i - j, two_sided, heads, dtype))
                    seen_values.append(values[j])
            if inputs.zero_kv_sink:
                for distance in range(max(-right, known[i][1] + 1), left + 1):
                    logits.append(_bias(bias, distance, two_sided, heads, dtype))
                    seen_values.append(nothing)
            if sink_logits is not None:
                logits.append(sink_logits[b, :, i - count].to(dtype))
                seen_values.append(sink_value)
            if logits:
                row[i - count] = (_weights(logits).unsqueeze(-1) * torch.stack(seen_values)).sum(0)
        if row:
            y[b] = torch.stack(row, 1)
    return y.to(q.dtype)


def _tokens(x: torch.Tensor, shared: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of keys or values (G, L, e), those of each token, for every head that shares them: L times (H, e)."""
    return list(x.to(dtype).repeat_interleave(shared, 0).unbind(1))


def _weights(logits: list[torch.Tensor]) -> torch.Tensor:
    """The softmax over the keys, of logits (H,) each; 0 in a head whose bias hides all of them."""
    stacked = torch.stack(logits)
    hidden = stacked.isneginf().all(0)
    return torch.where(hidden, 0.0, torch.where(hidden, 0.0, stacked).softmax(0))


def _sink_value(sink_values: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """(H, V) the value of the sink for each head, like (H, V) in dtype; 0 if none is given."""
    if sink_values is None:
        return torch.zeros_like(like)
    return sink_values.to(like.dtype).repeat_interleave(like.shape[0] // sink_values.shape[0], 0)


def _bias(bias: torch.Tensor | None, distance: int, two_sided: bool, heads: int, dtype: torch.dtype) -> torch.Tensor:
    if bias is None:
        return torch.zeros(heads, dtype=dtype)
    column = distance + bias.shape[1] // 2 if two_sided else distance
    return bias[:, min(max(column, 0), bias.shape[1] - 1)].to(dtype)


def _rows_example() -> AttentionInputs:
    """More than one block, a bias, and zeros before the row."""
    tensors = draw(dict.fromkeys("qkv", (1, 2, 150, 16)) | {"bias": (2, 9)})
    return AttentionInputs(**tensors, window=(12, -1), scale=0.25, zero_kv_sink=True)


def _sink_example() -> AttentionInputs:
    """A sink beside every window, whose value heads share; entries that do not fill a vector."""
    shapes: dict[str, tuple[int, ...]] = {"q": (1, 4, 20, 18), "k": (1, 2, 20, 18), "v": (1, 2, 20, 5)}
    return AttentionInputs(
        **draw(shapes | {"sink_logits": (1, 4, 20), "sink_values": (2, 5)}), window=(5, 0), scale=0.25
    )


EXAMPLES = (_rows_example, _sink_example)


def attention_step_reference(inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `hf_hybrid_ssm.ops.local_attention.slot_attention`; computes in the same precision."""
    q, k, v, keys, values, seen, bias, head_scale, sink_logits, sink_values, (left, right), *_ = inputs
    dtype, output_dtype, q = torch.promote_types(q.dtype, torch.float32), q.dtype, q.squeeze(2)
    k, v, sink_logits = (None if part is None else part.squeeze(2) for part in (k, v, sink_logits))
    if head_scale is not None:
        factor = head_scale.abs().to(dtype).unsqueeze(1)
        q, k = _normalised(q, dtype) * factor, None if k is None else _normalised(k, dtype)
        bias = None if bias is None else bias * factor
    y = torch.zeros(*q.shape[:2], values.shape[3], dtype=dtype)
    heads, shared = q.shape[1], q.shape[1] // keys.shape[1]
    for b in range(q.shape[0]):
        own = None if k is None or v is None else (k[b], v[b])
        rank = 0 if seen is None else int(seen[b])
        logits, seen_values = [], []
        for key, value, distance in _visible(inputs, b, own, rank):
            product = (q[b].to(dtype) * key.repeat_interleave(shared, 0).to(dtype)).sum(-1)
            logits.append(product * inputs.scale + _bias(bias, distance, False, heads, dtype))
            seen_values.append(value.repeat_interleave(shared, 0).to(dtype))
        if inputs.zero_kv_sink:
            for distance in range(max(-right, rank + 1), left + 1):
                logits.append(_bias(bias, distance, False, heads, dtype))
                seen_values.append(torch.zeros_like(y[b]))
        if sink_logits is not None:
            logits.append(sink_logits[b].to(dtype))
            seen_values.append(_sink_value(sink_values, y[b]))
        if logits:
            y[b] = (_weights(logits).unsqueeze(-1) * torch.stack(seen_values)).sum(0)
        if own is not None:
            _keep(keys[b], own[0], rank, inputs.layout)
            _keep(values[b], own[1], rank, inputs.layout)
    return y.to(output_dtype).unsqueeze(2), keys, values


def _visible(
    inputs: StepInputs, b: int, own: tuple[torch.Tensor, torch.Tensor] | None, rank: int
) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """(key, value, distance) of what the token of row b sees."""
    keys, values, mask = inputs.keys[b], inputs.values[b], inputs.mask
    slots = keys.shape[1]
    if own is None:
        return [(keys[:, j], values[:, j], 0) for j in range(slots) if mask is None or mask[b, j]]
    (left, right), chunk_size, layout = inputs.window, inputs.chunk_size, inputs.layout
    if layout == "block":
        earlier = [(keys[:, j], values[:, j], rank % slots - j) for j in range(rank % slots)]
    elif layout == "by_rank":
        slot_of = [(distance, (rank - distance) % slots) for distance in range(min(rank, slots), 0, -1)]
        earlier = [(keys[:, j], values[:, j], distance) for distance, j in slot_of]
    else:
        earlier = [(keys[:, j], values[:, j], slots - 1 - j) for j in range(slots - 1) if slots - 1 - j <= rank]
    known = [*earlier, (*own, 0)]
    if layout == "block":
        return [part for part in known if part[2] >= -right]
    reach = rank if left is None else left
    reach = reach if chunk_size is None else min(reach, rank % chunk_size)
    return [part for part in known if -right <= part[2] <= reach]


def _keep(slots: torch.Tensor, new: torch.Tensor, rank: int, layout: str) -> None:
    """The new key or value (G, e) among the held ones (G, M, e), in place."""
    if layout == "block" and rank % slots.shape[1] == slots.shape[1] - 1:
        slots.zero_()
        return
    slots[:, rank % slots.shape[1] if layout in ("block", "by_rank") else -1] = new


def _normalised(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x = x.to(dtype)
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _step_example(seen: list[int], zero_kv_sink: bool, **sink: tuple[int, ...]) -> StepInputs:
    """Shared keys, a row at its start, entries that do not fill a vector."""
    shapes = {"q": (2, 4, 1, 18), "k": (2, 2, 1, 18), "v": (2, 2, 1, 5), "keys": (2, 2, 7, 18), "values": (2, 2, 7, 5)}
    tensors = draw(shapes | {"bias": (4, 5), "head_scale": (4,)} | sink)
    tables = {"sink_logits": None, "sink_values": None, "seen": torch.tensor(seen)} | tensors
    options: dict[str, Any] = {"window": (6, -1), "chunk_size": None, "layout": "free", "scale": 1.0}
    return StepInputs(**tables, **options, zero_kv_sink=zero_kv_sink, mask=None)


def _masked_example() -> StepInputs:
    """Slots alone, of which a row sees those in the middle, with one between that it does not; another row all."""
    mask = torch.tensor([[0, 1, 1, 0, 1, 0, 0], [1] * 7]).bool()
    return _step_example([0, 0], False)._replace(k=None, v=None, seen=None, bias=None, mask=mask)


STEP_EXAMPLES = (
    lambda: _step_example([3, 40], True),
    lambda: _step_example([0, 40], False, sink_logits=(2, 4, 1), sink_values=(2, 5)),  # whose value heads share
    _masked_example,
)
