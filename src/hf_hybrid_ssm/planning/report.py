"""A plan as text: in full, or one line per preset."""

from collections.abc import Sequence
from dataclasses import replace

from hf_hybrid_ssm.planning.measurement import measure_step
from hf_hybrid_ssm.planning.presets import preset_config, preset_names
from hf_hybrid_ssm.planning.setup import Setup
from hf_hybrid_ssm.planning.training_step import Plan, plan

EXPLANATIONS = {
    "parameters": "weights",
    "gathered": "FSDP2: one layer's gathered weights and gradients, and those outside of layers",
    "gradients": "one for each trained weight",
    "buckets": "DDP: gradients a second time, in buckets for the reduction",
    "optimizer": "AdamW: two moments for each trained weight",
    "activations": "what the forward keeps for the backward",
    "recomputed": "checkpointing: the largest layer, while it is recomputed",
    "logits": "logits, log-softmax, gradient",
}


def human_bytes(count: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def si(count: float) -> str:
    """A number in decimal units."""
    for unit in ("", "K", "M", "G", "T"):
        if count < 1000:
            return f"{count:.4g}{unit}"
        count /= 1000
    return f"{count:,.4g}P"


def description(name: str, estimate: Plan, setup: Setup) -> str:
    """A plan, line by line."""
    lines = [f"{name}: {estimate.parameters:,} parameters, {estimate.trainable:,} of them trainable", ""]
    lines.append(f"memory of each of {setup.gpus} devices, {setup.batch} rows of {setup.length} tokens on each")
    for kind, size in estimate.memory.items():
        if size:
            lines.append(f"  {kind:<12}{human_bytes(size):>12}   {EXPLANATIONS[kind]}")
    lines += [f"  {'total':<12}{human_bytes(estimate.total):>12}   if everything is in memory at once", ""]
    lines.append("operations of a forward, per token")
    tokens = setup.batch * setup.length
    lines += [f"  {kind:<20}{si(count / tokens):>12}" for kind, count in estimate.forward_flops.items() if count]
    lines += ["", f"operations of a step, over all devices: {si(estimate.step_flops)}"]
    if estimate.state:
        lines.append(f"state of a decoded sequence of {setup.length} tokens: {human_bytes(estimate.state)}")
    return "\n".join(lines)


COLUMNS = (
    "preset",
    "parameters",
    "weights, gradients, AdamW",
    "activations",
    "with checkpointing",
    "logits",
    "forward / token",
    "step",
    "decoding state",
)


def preset_line(name: str, setup: Setup) -> Sequence[str]:
    """One preset's row of `COLUMNS`."""
    config = preset_config(name)
    plain = plan(config, setup)
    again = measure_step(config, replace(setup, checkpointing=True), backward=False)
    fixed = sum(plain.memory[kind] for kind in plain.memory if kind not in ("activations", "recomputed", "logits"))
    return (
        name,
        si(plain.parameters),
        human_bytes(fixed),
        human_bytes(plain.memory["activations"]),
        human_bytes(again.activations + again.recomputed),
        human_bytes(plain.memory["logits"]) if plain.memory["logits"] else "-",
        si(sum(plain.forward_flops.values()) / (setup.batch * setup.length)),
        si(plain.step_flops),
        human_bytes(plain.state) if plain.state else "-",
    )


def _is_of_a_paper(name: str) -> bool:
    """A language model or encoder-decoder of a paper: not a task of the Long Range Arena, nor a size of ours."""
    return not any(part in name for part in ("-lra-", "-rule", "-deep"))


def page(setup: Setup, command: str) -> str:
    """reports/planning.md."""
    rows = [preset_line(name, setup) for name in filter(_is_of_a_paper, preset_names())]
    lines = ["| " + " | ".join(line) + " |" for line in (COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *rows)]
    return TEXT.format(
        command=command,
        batch=setup.batch,
        length=setup.length,
        weights=setup.dtype + (", computing in bfloat16" if setup.mixed_precision else ""),
        table="\n".join(lines),
    )


TEXT = """# Plans of the presets

One device, {batch} rows of {length} tokens (an encoder-decoder: of source and target each), weights in {weights},
AdamW.

{table}

*`{command}`. "Step": forward and backward. "Decoding state": of one sequence of {length} tokens.
A model without logits computes its loss in chunks. Other presets: `hf-hybrid-ssm plan PRESET`.*
"""
