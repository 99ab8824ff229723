"""Parameters of the official S4 (standalone/s4.py of state-spaces/s4, and its copy in SPADE's code) as ours."""

import torch

KERNEL_TENSORS = ("C", "log_dt", "B", "P", "inv_w_real", "w_imag", "L")


def convert_systems(systems: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors of all state-space models: their parts (D and `kernel.kernel.*`) by the prefix of our names.

    Raises:
        ValueError: a part is missing or has another shape.
    """
    converted: dict[str, torch.Tensor] = {}
    for prefix, system in sorted(systems.items()):
        kernel = {name.removeprefix("kernel.kernel."): part for name, part in system.items() if name != "D"}
        if "D" not in system or not kernel:
            raise ValueError(f"{prefix} has only a part of its S4: kernel and D are needed.")
        converted |= {f"{prefix}.{name}": part for name, part in convert_s4(kernel, system["D"]).items()}
    return converted


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
