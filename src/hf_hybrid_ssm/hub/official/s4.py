"""What both converters share: their names, and the official S4 (standalone/s4.py of state-spaces/s4, and its copy in
SPADE's code) with our parameters."""

import re
from typing import Any

import torch

from hf_hybrid_ssm.hub.official.state_dict import Rule, our_name

KERNEL_TENSORS = ("C", "log_dt", "B", "P", "inv_w_real", "w_imag", "L")


def rules_of(names: dict[str, str]) -> list[Rule]:
    """Regular expressions of official names, and templates of ours."""
    return [(re.compile(theirs), ours) for theirs, ours in names.items()]


def renamed(
    official: dict[str, torch.Tensor], rules: list[Rule], system: str, prefix: str
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Tensors by our names, those of state-space models converted, and the keys that have no rule.

    Args:
        official: by their official names.
        rules: names of tensors that stay as they are.
        system: matches what stands before the tensors of a state-space model (D and `kernel.kernel.*`).
        prefix: template of what stands before ours.

    Raises:
        ValueError: a part of a state-space model is missing or has another shape.
    """
    converted: dict[str, torch.Tensor] = {}
    systems: dict[str, dict[str, torch.Tensor]] = {}
    others = []
    for key, tensor in official.items():
        if name := our_name(key, rules):
            converted[name] = tensor
        elif match := re.fullmatch(rf"{system}\.(?P<part>D|kernel\.kernel\..*)", key):
            systems.setdefault(match.expand(prefix), {})[match["part"].removeprefix("kernel.kernel.")] = tensor
        else:
            others.append(key)
    for name, kernel in sorted(systems.items()):
        skip = kernel.pop("D", None)
        if skip is None or not kernel:
            raise ValueError(f"{name} has only a part of its S4: kernel and D are needed.")
        converted |= {f"{name}.{part}": tensor for part, tensor in convert_s4(kernel, skip).items()}
    return converted, others


def sizes_of_systems(converted: dict[str, torch.Tensor], layers: str) -> dict[str, Any]:
    """Which layers have state-space models, and their sizes; `layers` is the prefix of the layers' numbers."""
    found = re.compile(rf"{re.escape(layers)}(\d+)\.mixing\.ssm\.A_imag")
    shapes = {int(match[1]): tensor.shape for name, tensor in converted.items() if (match := found.fullmatch(name))}
    if not shapes:
        return {"ssm_layers": []}
    dynamics, modes = shapes[min(shapes)][:2]
    return {"ssm_layers": sorted(shapes), "ssm_state_size": 2 * modes, "ssm_num_dynamics": dynamics}


def known_settings(settings: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Fields of our configuration from official settings; `names` are official and ours."""
    fields = {ours: settings[name] for name, ours in names.items() if settings.get(name) is not None}
    if settings.get("local_radius") is not None:
        fields["sliding_window"] = settings["local_radius"] + 1  # which counts the other tokens of one side only
    return fields


def convert_s4(kernel: dict[str, torch.Tensor], skip: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors of `hf_hybrid_ssm.layers.mixers.s4.S4` with the same kernel, in float32.

    Args:
        kernel: the tensors of an `SSKernelNPLR` of rank one (`KERNEL_TENSORS`): C (F, D, n, 2), log_dt (D,),
            B and P (1, S, n, 2), inv_w_real = log(-Re Lambda) and w_imag (S, n), and L, the length for which C is
            stored as C~ = (I - (Abar^L)^T) C; 0 if C is stored itself.
        skip: its D, (1, D).

    Raises:
        ValueError: a tensor is missing or has another shape; named with what is expected.
    """
    if missing := [name for name in KERNEL_TENSORS if name not in kernel]:
        raise ValueError(f"The S4 kernel lacks {', '.join(missing)}.")
    if kernel["C"].dim() != 4 or kernel["C"].shape[-1] != 2:
        raise ValueError(f"C of the S4 kernel has shape {tuple(kernel['C'].shape)}, expected (F, D, n, 2).")
    channels, pairs = kernel["C"].shape[1:3]
    copies = kernel["w_imag"].shape[0]
    shapes = {"w_imag": (copies, pairs), "inv_w_real": (copies, pairs), "log_dt": (channels,), "L": ()}
    shapes |= {"B": (1, copies, pairs, 2), "P": (1, copies, pairs, 2)}
    for name, shape in shapes.items():
        if tuple(kernel[name].shape) != shape:
            raise ValueError(f"{name} of the S4 kernel has shape {tuple(kernel[name].shape)}, expected {shape}.")
    if tuple(skip.shape) != (1, channels) or channels % copies:
        raise ValueError(
            f"D of S4 has shape {tuple(skip.shape)} and there are {copies} copies of A; expected (1, {channels}) and "
            f"a divisor of {channels}."
        )
    parameters = {
        "A_log_real": kernel["inv_w_real"],
        "A_imag": kernel["w_imag"],
        "B": kernel["B"][0],
        "P": kernel["P"][0],
        "C": _untransformed(kernel),
        "log_dt": kernel["log_dt"].unsqueeze(0),
        "D": skip,
    }
    return {name: tensor.float().contiguous() for name, tensor in parameters.items()}


def _untransformed(kernel: dict[str, torch.Tensor]) -> torch.Tensor:
    """C of C~, over both halves of the conjugate pairs in float64."""
    if int(kernel["L"]) == 0:
        return kernel["C"]
    repeats = kernel["C"].shape[1] // kernel["w_imag"].shape[0]
    eigenvalues = torch.complex(-torch.exp(kernel["inv_w_real"].double()), kernel["w_imag"].double())
    low_rank = torch.view_as_complex(kernel["P"][0].double().contiguous())
    c = torch.view_as_complex(kernel["C"].double().contiguous())
    eigenvalues, low_rank, c = (torch.cat([t, t.conj()], dim=-1) for t in (eigenvalues, low_rank, c))
    a = torch.diag_embed(eigenvalues) - low_rank.unsqueeze(-1) * low_rank.conj().unsqueeze(-2)  # (S, N, N)
    half = torch.exp(kernel["log_dt"].double())[:, None, None] / 2 * a.repeat(repeats, 1, 1)
    identity = torch.eye(a.shape[-1], dtype=a.dtype)
    step = torch.linalg.solve(identity - half, identity + half)
    transformed = identity - torch.linalg.matrix_power(step, int(kernel["L"])).transpose(-1, -2)
    c = torch.linalg.solve(transformed, c.permute(1, 2, 0)).permute(2, 0, 1)
    return torch.view_as_real(c[..., : c.shape[-1] // 2].contiguous())
