"""What the reference says of a model's `forward`: its own arguments, and the fields of what it returns."""

import dataclasses
import inspect
import re
from typing import Any

SHARED = {
    *("input_ids", "attention_mask", "position_ids", "inputs_embeds", "cache", "past_key_values", "use_cache"),
    "seq_idx",
    *("decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "encoder_outputs", "cu_seq_lens_q"),
    *("continues_documents", "logits_to_keep", "start_positions", "end_positions", "kwargs"),
}
ENTRY = re.compile(r"^ *(\w+) \((.*?)\):\n((?:(?! *\w+ \(.*\):$) +\S.*\n?)+)", re.MULTILINE)


def of_forward(forward: Any) -> list[str]:
    """Lines for autodoc, in napoleon's format."""
    parameters = [name for name in inspect.signature(forward).parameters if name != "self"]
    own = {name: (kind, " ".join(text.split())) for name, kind, text in ENTRY.findall(inspect.getdoc(forward) + "\n")}
    lines = ["Args:"]
    for name in parameters:
        if name in own and name not in SHARED:
            kind, text = own[name]
            lines.append(f"    {name} ({kind}): {text}")
    rest = ", ".join(f"``{name}``" for name in parameters if name in SHARED and name != "kwargs")
    lines = [f"Inputs of every model (above): {rest}.", "", *(lines if len(lines) > 1 else [])]
    returned = inspect.signature(forward).return_annotation
    if dataclasses.is_dataclass(returned):
        fields = ", ".join(f"``{field.name}``" for field in dataclasses.fields(returned))
        lines += ["", "Returns:", f"    transformers' ``{returned.__name__}`` with {fields}."]
    return lines


def without_boilerplate(text: str) -> str:
    """A class's docstring, without what transformers says in each of its classes."""
    return re.sub(r"\n\s*This model inherits from \[`PreTrainedModel`\].*", "\n", text, flags=re.DOTALL)


def on_one_line(text: str) -> str:
    """Arguments whose types go over to a second line: napoleon reads one."""
    return re.sub(r"(?m)^( +\w[\w, ]*\([^()\n]*)\n +([^()\n]*\):)", r"\1 \2", text)
