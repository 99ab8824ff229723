"""A linear map whose weight has 8 or 4 bits, on CPUs: of 4 bits by torch's own kernel.

8 bits: one scale a row, `y = x (codes · scale)ᵀ`. 4 bits: a scale and a zero for every `group_size` columns of a row,
`y = x ((codes - 8) · scale + zero)ᵀ`, where the grid reaches from the smallest to the largest weight of the group.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hf_hybrid_ssm.layers.float32_linear import has_fast_products
from hf_hybrid_ssm.layers.low_bit_grid import DTYPES, check_grid, fits
from hf_hybrid_ssm.layers.low_bit_kernels import known_layout, low_bit_product, pack, unpack
from hf_hybrid_ssm.ops.int8_product.torch_backend import fitted

ROWS = 16  # the kernel of 4 bits wants multiples of it; outputs in between are padded
# both kernels are for decoding; more rows are multiplied by a weight that is converted for the call
FEW_ROWS = {8: 16, 4: 64}


class LowBitLinear(nn.Module):
    """`nn.Linear` for inference on a CPU, with weights of `bits` bits.

    Args:
        in_features, out_features: as in `nn.Linear`. With 4 bits `in_features` is a multiple of `group_size`.
        bits: 8 or 4.
        group_size: how many columns share a scale, with 4 bits: 32, 64, 128 or 256.
        bias: whether there is one; it keeps its precision.

    Its buffers are `weight_codes`, int8 `(out_features, in_features)` or uint8, two codes a byte,
    `(out_features rounded up to 16, in_features / 2)`, and `weight_scales`, `(out_features,)` or
    `(in_features / group_size, out_features rounded up to 16, 2)`, scale and zero. Packed for this processor's kernel
    the codes of 4 bits are as many in one dimension; `state_dict` gives and takes them unpacked, for every processor.

    Raises:
        ValueError: bits, a group size or a shape that the kernels do not have.
    """

    weight_codes: Tensor
    weight_scales: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bits: int,
        group_size: int = 32,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_grid(bits, group_size)
        if not fits(in_features, bits, group_size):
            raise ValueError(f"in_features={in_features} must be a multiple of group_size={group_size} with 4 bits.")
        self.in_features, self.out_features = in_features, out_features
        self.bits, self.group_size = bits, group_size
        padded = -(-out_features // ROWS) * ROWS
        if bits == 8:
            codes = torch.zeros(out_features, in_features, dtype=torch.int8, device=device)
            scales = torch.ones(out_features, dtype=dtype, device=device)
        else:
            codes = torch.zeros(padded, in_features // 2, dtype=torch.uint8, device=device)
            scales = torch.ones(in_features // group_size, padded, 2, dtype=dtype, device=device)
        self._shapes = (codes.shape, scales.shape)
        self.register_buffer("weight_codes", codes)
        self.register_buffer("weight_scales", scales)
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device), False) if bias else None

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, bits: int, group_size: int = 32) -> "LowBitLinear":
        """The map of an `nn.Linear`, its weights rounded to the nearest code."""
        weight = linear.weight.detach()
        rounded = cls(
            linear.in_features,
            linear.out_features,
            bits=bits,
            group_size=group_size,
            bias=linear.bias is not None,
            device=weight.device,
            dtype=weight.dtype,
        )
        if linear.bias is not None:
            rounded.bias = nn.Parameter(linear.bias.detach().clone(), False)
        rounded._round_to_8_bits(weight.float()) if bits == 8 else rounded._round_to_4_bits(weight.float())
        return rounded.train(linear.training)

    def _round_to_8_bits(self, weight: Tensor) -> None:
        self.weight_scales.copy_((weight.abs().amax(1) / 127).clamp(min=1e-7))
        codes = (weight / self.weight_scales.float()[:, None]).round_()
        self.weight_codes.copy_(codes.clamp_(-127, 127))

    def _round_to_4_bits(self, weight: Tensor) -> None:
        groups = weight.view(self.out_features, -1, self.group_size)
        low, high = groups.amin(-1), groups.amax(-1)
        scale = ((high - low) / 15).clamp(min=1e-7)
        scales = torch.stack([scale, low + 8 * scale], -1).transpose(0, 1)
        self.weight_scales[:, : self.out_features].copy_(scales)
        # against the scales as they are stored, which have the dtype of the weights
        scale, zero = self.weight_scales[:, : self.out_features].float().transpose(0, 1).unbind(-1)
        codes = ((groups - zero[..., None]) / scale[..., None]).round_().add_(8).clamp_(0, 15)
        codes = codes.view_as(weight).to(torch.uint8)
        self.weight_codes[: self.out_features].copy_(_in_pairs(codes))

    @property
    def is_packed(self) -> bool:
        """Whether the codes of 4 bits are in the order of this processor's kernel; by the tensor's shape, since
        weights are also replaced without a call of this class."""
        return self.bits == 4 and self.weight_codes.dim() == 1

    def _packed_codes(self) -> Tensor:
        """Those of 4 bits as the kernel takes them, (rows, in_features / 2)."""
        if self.is_packed:
            return self.weight_codes.view(self._shapes[0])
        return pack(_apart(self.weight_codes))

    def _unpacked_codes(self) -> Tensor:
        if not self.is_packed:
            return self.weight_codes
        layout = known_layout()
        if layout is not None:
            return _in_pairs(unpack(self._packed_codes(), layout).T)
        # the kernel itself reads any layout: the rows of the identity
        padded, groups = self._shapes[0][0], self.in_features // self.group_size
        scales = torch.stack([torch.ones(groups, padded), torch.zeros(groups, padded)], -1)
        codes = low_bit_product(torch.eye(self.in_features), self._packed_codes(), scales, self.group_size)
        return _in_pairs(codes.round().add_(8).to(torch.uint8).T)

    def pack(self) -> None:
        """Bring the codes to where torch's kernels read them: an aligned address, and with 4 bits this processor's
        order; idempotent.

        Raises:
            ValueError: codes or scales of another shape took the place of this map's.
        """
        codes, scales = self.weight_codes, self.weight_scales
        of_codes, of_scales = self._shapes
        wanted = (of_codes.numel(),) if self.is_packed else of_codes
        if codes.shape != wanted or scales.shape != of_scales:
            raise ValueError(
                f"weight_codes and weight_scales must have shapes {tuple(wanted)} and {tuple(of_scales)}, "
                f"got {tuple(codes.shape)} and {tuple(scales.shape)}."
            )
        if type(codes) is not Tensor or codes.device.type != "cpu":
            return  # without memory
        with torch.inference_mode(False):  # what that mode makes takes no weights later
            fitting = fitted(codes if self.bits == 8 or self.is_packed else self._packed_codes().flatten())
        if fitting is not codes:
            self.weight_codes = fitting

    def dequantized(self) -> Tensor:
        """The weight `(out_features, in_features)` that the codes stand for, in float64."""
        scales = self.weight_scales.double()
        if self.bits == 8:
            return self.weight_codes.double() * scales[:, None]
        codes = _apart(self._unpacked_codes()).double()
        scale, zero = scales.transpose(0, 1).repeat_interleave(self.group_size, 1).unbind(-1)
        return ((codes - 8) * scale + zero)[: self.out_features]

    def to_linear(self, dtype: torch.dtype) -> nn.Linear:
        """The map as `nn.Linear`, whose weight is what the codes stand for, rounded to `dtype`."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight = nn.Parameter(self.dequantized().to(dtype))
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().to(dtype))
        return linear.train(self.training)

    def forward(self, inputs: Tensor) -> Tensor:
        """`(..., in_features)` to `(..., out_features)`, in the inputs' dtype.

        Raises:
            TypeError: inputs that are not float32, bfloat16 or float16.
            ValueError: inputs on another device than a CPU.
            NotImplementedError: inputs that require a gradient, which these kernels do not compute.
        """
        if inputs.dtype not in DTYPES:
            raise TypeError(f"inputs must be float32, bfloat16 or float16, got {inputs.dtype}.")
        if inputs.device.type != "cpu" or self.weight_codes.device.type != "cpu":
            raise ValueError(f"weights of {self.bits} bits are for CPUs; the inputs are on {inputs.device}.")
        if inputs.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"weights of {self.bits} bits give no gradient; train the model before rounding."
            )
        flat = inputs.reshape(-1, self.in_features)
        if not torch.compiler.is_compiling():
            self.pack()
        if flat.numel() == 0:
            outputs = flat.new_zeros(len(flat), self.out_features)
        elif self._is_for_a_product(len(flat)):
            wide = flat.dtype if has_fast_products(flat.dtype) else torch.float32
            outputs = self._product(flat.to(wide)).to(flat.dtype)
        else:
            outputs = self._kernel(flat)
        if self.bias is not None:
            outputs = outputs + self.bias.to(outputs.dtype)
        return outputs.reshape(*inputs.shape[:-1], self.out_features)

    def _is_for_a_product(self, rows: int) -> bool:
        if self.bits == 8:
            return rows > FEW_ROWS[8]
        return rows > FEW_ROWS[4] and known_layout() is not None

    def _product(self, flat: Tensor) -> Tensor:
        """(R, I) times the whole weight, which is made in the dtype of `flat`."""
        scales = self.weight_scales.to(flat.dtype)
        if self.bits == 8:  # the codes are exact in all three dtypes
            return nn.functional.linear(flat, self.weight_codes.to(flat.dtype)) * scales
        layout = known_layout()
        assert layout is not None  # `_is_for_a_product`
        codes = unpack(self._packed_codes(), layout).to(flat.dtype).sub_(8).unflatten(0, (-1, self.group_size))
        scale, zero = (part.contiguous().unsqueeze(1) for part in scales.unbind(-1))
        return (flat @ torch.addcmul(zero, codes, scale).flatten(0, 1))[:, : self.out_features]

    def _kernel(self, flat: Tensor) -> Tensor:
        scales = self.weight_scales.to(flat.dtype)
        if self.bits == 8:
            return low_bit_product(flat, self.weight_codes, scales)
        return low_bit_product(flat, self._packed_codes(), scales, self.group_size)[:, : self.out_features]

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight_codes"] = self._unpacked_codes()

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        if prefix + "weight_codes" in state_dict:
            self.weight_codes = self._unpacked_codes()
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.pack()

    def extra_repr(self) -> str:
        group = f", group_size={self.group_size}" if self.bits == 4 else ""
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}{group}"


def _in_pairs(codes: Tensor) -> Tensor:
    """(rows, columns) of codes → (rows, columns / 2), two in a byte."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def _apart(pairs: Tensor) -> Tensor:
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)
