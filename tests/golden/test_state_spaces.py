"""S4, S4D, S5, Hyena's filter, the moving average and the Legendre memory against their official codes."""

import pytest
import torch

from hf_hybrid_ssm.hub.official.s4 import convert_s4
from hf_hybrid_ssm.layers.mixers.base import Mixer
from hf_hybrid_ssm.layers.mixers.ema import EMA
from hf_hybrid_ssm.layers.mixers.hippo import legs_dplr
from hf_hybrid_ssm.layers.mixers.hyena import Hyena, ImplicitLongConv
from hf_hybrid_ssm.layers.mixers.s4 import S4
from hf_hybrid_ssm.layers.mixers.s4d import S4D
from hf_hybrid_ssm.layers.mixers.s5 import S5
from hf_hybrid_ssm.ops.legendre_memory import impulse_response, transition
from tests.golden.values import FLOAT32, Tensors, assert_near, golden, load
from tests.row_options import legendre_memory, mix, one_token

WIDE = {"dtype": torch.float64}
PIECES = [5, 1, 1, 8, 9]


def diagonal(tensors: Tensors, skip: torch.Tensor) -> Tensors:
    """Parameters of the official `SSMKernelDiag` and `SSMKernelDPLR`, whose C is not yet C~, as ours."""
    found = {
        "A_log_real": tensors["A_real"],
        "A_imag": -tensors["A_imag"],
        "B": tensors["B"][0],
        "C": tensors["C"],
        "log_dt": tensors["inv_dt"].T,
        "D": skip,
    }
    return found | ({"P": tensors["P"][0]} if "P" in tensors else {})


def in_pieces(mixer: Mixer, u: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """y with the state handed from piece to piece, single tokens by `step`, and the last state."""
    state, parts = mixer.init_state(u.shape[0], dtype=u.dtype), []
    for piece in u.split(lengths, dim=1):
        if piece.shape[1] == 1:
            y, state = one_token(mixer, piece[:, 0], state)
            parts.append(y.unsqueeze(1))
        else:
            y, state = mix(mixer, piece, initial_state=state, return_final_state=True)
            parts.append(y)
    return torch.cat(parts, 1), state


def s4(part: str, **options) -> S4:
    tensors = golden("s4_nplr", part)
    copies, pairs = tensors["A_real"].shape
    mixer = S4(tensors["C"].shape[1], state_size=2 * pairs, num_dynamics=copies, block_size=8, **options, **WIDE)
    load(mixer, diagonal(tensors, golden("s4_nplr")["D"]))
    return mixer


@pytest.mark.parametrize("case", ["untied", "tied", "two"])
def test_s4_kernel(case):
    wanted = golden("s4_nplr")[f"dplr_{case}.kernel"]
    assert_near(s4(f"dplr_{case}.raw").kernel(wanted.shape[-1], torch.float64), wanted)


def test_s4_kernel_beyond_its_first_length():
    wanted = golden("s4_nplr")["dplr_untied.kernel_long"]
    assert_near(s4("dplr_untied.raw").kernel(wanted.shape[-1], torch.float64), wanted)


@pytest.mark.parametrize("case", ["untied.tilde", "tied.tilde", "two.tilde", "untied.doubled"])
def test_s4_converter(case):
    """C back from C~, at the length it was made for and after the official code doubled that; stored in float32."""
    tensors, everything = golden("s4_nplr", f"dplr_{case}"), golden("s4_nplr")
    old_names = {
        "C": tensors["C"],
        "log_dt": tensors["inv_dt"][:, 0],
        "B": tensors["B"],
        "P": tensors["P"],
        "inv_w_real": tensors["A_real"],
        "w_imag": -tensors["A_imag"],
        "L": tensors["l_kernel"],
    }
    converted = convert_s4(old_names, everything["D"])
    name = case.split(".")[0]
    raw = diagonal(golden("s4_nplr", f"dplr_{name}.raw"), everything["D"])
    assert converted.keys() == raw.keys()
    for key, tensor in converted.items():
        assert_near(tensor.double(), raw[key], FLOAT32)
    copies, pairs = tensors["A_real"].shape
    mixer = S4(tensors["C"].shape[1], state_size=2 * pairs, num_dynamics=copies, **WIDE)
    load(mixer, converted)
    wanted = everything["dplr_untied.kernel_long" if case == "untied.doubled" else f"dplr_{name}.kernel"]
    assert_near(mixer.kernel(wanted.shape[-1], torch.float64), wanted, FLOAT32)


def test_s4_convolution_and_recurrence():
    """The official convolution, and its three forms of the recurrence."""
    tensors = golden("s4_nplr")
    u, mixer = tensors["u"].transpose(1, 2), s4("dplr_untied.raw")
    assert_near(mixer(u)[0].transpose(1, 2), tensors["dplr_untied.y"])
    pieces = in_pieces(mixer, u, PIECES)[0].transpose(1, 2)
    assert_near(pieces, tensors["dplr_untied.y"])
    for form in ("dense", "diagonal", "linear"):  # without D
        stepped = tensors[f"dplr_untied.step_{form}"] + tensors["D"][0, :, None] * tensors["u"]
        assert_near(pieces, stepped)


def test_s4_two_sided():
    tensors = golden("s4_nplr")
    mixer = s4("dplr_two_sided.raw", bidirectional=True)
    wanted = tensors["dplr_two_sided.kernel"]
    for direction in range(2):
        kernel = mixer.kernel(wanted.shape[-1], torch.float64, direction)
        assert_near(kernel[0], wanted[direction])
    assert_near(mixer(tensors["u"].transpose(1, 2))[0].transpose(1, 2), tensors["dplr_two_sided.y"])


def test_s4_initial_values():
    """LegS in its diagonal-plus-low-rank form; eigenvectors have a free phase, so products of B and P are compared."""
    eigenvalues, b, p = legs_dplr(16)
    tensors = {name: torch.view_as_complex(part) for name, part in golden("s4_nplr", "init_unclipped").items()}
    assert_near(torch.view_as_real(eigenvalues), torch.view_as_real(tensors["A"]))
    for ours, theirs in ((b, tensors["B"]), (p, tensors["P"][0])):
        assert_near(ours.abs(), theirs.abs())
    assert_near(torch.view_as_real(b * p.conj()), torch.view_as_real(tensors["B"] * tensors["P"][0].conj()))
    stored = golden("s4_nplr", "init")  # float32; the real part of A comes from a float32 mean
    assert_near(eigenvalues.imag.float(), -stored["A_imag"][0], FLOAT32)
    assert_near(torch.log(-eigenvalues.real).float(), stored["A_real"][0], FLOAT32)
    assert_near(p.abs().float(), torch.view_as_complex(stored["P"][0, 0]).abs(), FLOAT32)


S4D_CASES = [f"{init}_{rule}" for init in ("lin", "inv", "legs") for rule in ("zoh", "bilinear")]


def s4d(part: str, rule: str, **options) -> S4D:
    tensors = golden("s4d", part)
    copies, pairs = tensors["A_real"].shape
    options |= {"num_dynamics": copies, "discretization": rule, "block_size": 8}
    mixer = S4D(tensors["C"].shape[1], state_size=2 * pairs, **options, **WIDE)
    load(mixer, diagonal(tensors, golden("s4d")["D"]))
    return mixer


@pytest.mark.parametrize("case", S4D_CASES)
def test_s4d(case):
    """Kernel, convolution, recurrence and gradients."""
    tensors, wanted = golden("s4d"), golden("s4d", case)
    u, mixer = tensors["u"].transpose(1, 2), s4d(case, case.split("_")[1])
    assert_near(mixer.kernel(wanted["kernel"].shape[-1], torch.float64), wanted["kernel"])
    y = mixer(u)[0].transpose(1, 2)
    assert_near(y, wanted["y"])
    pieces, state = in_pieces(mixer, u, PIECES)
    assert_near(pieces.transpose(1, 2), wanted["y"])
    assert_near(state, wanted["last_state"].flatten(-2))
    (y * tensors["weight"]).sum().backward()
    gradients = {name: wanted[f"grad_{name}"] for name in ("A_real", "A_imag", "B", "C", "inv_dt")}
    for name, gradient in diagonal(gradients, tensors["D"]).items():
        if name != "D":
            assert_near(mixer.get_parameter(name).grad, gradient)


def test_s4d_two_sided():
    tensors = golden("s4d")
    mixer = s4d("two_sided", "zoh", bidirectional=True)
    for direction in range(2):
        kernel = mixer.kernel(24, torch.float64, direction)
        assert_near(kernel[0], tensors["two_sided.kernel"][direction])
    assert_near(mixer(tensors["u"].transpose(1, 2))[0].transpose(1, 2), tensors["two_sided.y"])


def test_s4d_minimal():
    """The few lines that the same project publishes as an introduction: B = 1, real and imaginary part apart."""
    tensors = golden("s4d", "minimal")
    channels, pairs = tensors["log_A_real"].shape
    mixer = S4D(channels, state_size=2 * pairs, **WIDE)
    ones = torch.zeros(channels, pairs, 2, dtype=torch.float64)
    ones[..., 0] = 1
    values = {"A_log_real": tensors["log_A_real"], "A_imag": tensors["A_imag"], "B": ones}
    values |= {"C": tensors["C"].unsqueeze(0), "log_dt": tensors["log_dt"].unsqueeze(0), "D": golden("s4d")["D"]}
    load(mixer, values)
    assert_near(mixer.kernel(tensors["kernel"].shape[-1], torch.float64)[0], tensors["kernel"])


@pytest.mark.parametrize("init", ["lin", "legs"])
def test_s4d_initial_values(init):
    """The official kernel takes the other one of each conjugate pair in "lin", and at least 1e-4 for a frequency."""
    wanted = golden("s4d", f"init_{init}")
    mixer = S4D(4, state_size=16, num_dynamics=1, init=init)
    assert_near(mixer.A_log_real.detach(), wanted["A_real"], FLOAT32)
    assert_near(mixer.A_imag.detach().abs().clamp(min=1e-4), wanted["A_imag"], FLOAT32)
    if init == "lin":  # B of "legs" is clipped in a basis whose phases are free
        assert torch.equal(mixer.B.detach(), wanted["B"][0])


@pytest.mark.parametrize("case", ["causal", "clipped", "complex", "two_sided"])
def test_s5(case):
    """ZOH with conjugate symmetry; C begun in three ways, eigenvalues clipped, both directions; with gradients."""
    tensors, wanted = golden("s5"), golden("s5", case)
    two_sided = case == "two_sided"

    def ours(prefix: str) -> Tensors:
        c = [wanted[f"{prefix}{name}"] for name in (("C1", "C2") if two_sided else ("C",))]
        return {
            "A_real": wanted[f"{prefix}Lambda_re"],
            "A_imag": wanted[f"{prefix}Lambda_im"],
            "B": wanted[f"{prefix}B"],
            "C": torch.stack(c),
            "log_dt": wanted[f"{prefix}log_step"][:, 0],
            "D": wanted[f"{prefix}D"].unsqueeze(0),
        }

    mixer = S5(4, state_size=12, blocks=3, bidirectional=two_sided, **WIDE)
    load(mixer, ours(""))
    x = tensors["x"].requires_grad_()
    y, _ = mixer(x)
    assert_near(y, wanted["y"])
    (y * tensors["weight"]).sum().backward()
    assert_near(x.grad, wanted["grad_x"])
    for name, gradient in ours("grad_").items():
        assert_near(mixer.get_parameter(name).grad, gradient)
    if not two_sided:
        assert_near(in_pieces(mixer, x.detach(), [5, 1, 1, 11])[0], wanted["y"])


def test_s5_initial_eigenvalues():
    mixer = S5(4, state_size=12, blocks=3, **WIDE)
    assert_near(torch.stack([mixer.A_real, mixer.A_imag], -1).detach(), golden("s5")["Lambda"])


def hyena_filter(tensors: Tensors) -> Tensors:
    """Parameters of the official `HyenaFilter` as ours; its sines share one frequency."""
    layers = sorted(int(key.split(".")[1]) for key in tensors if key.endswith("weight"))
    first, *inner, last = layers
    assert torch.equal(tensors["implicit_filter.1.freq"], tensors[f"implicit_filter.{first + 3}.freq"])
    return {
        "ffn_in": tensors[f"implicit_filter.{first}.weight"],
        "ffn_in_bias": tensors[f"implicit_filter.{first}.bias"],
        "ffn": torch.stack([tensors[f"implicit_filter.{index}.weight"] for index in inner]),
        "ffn_bias": torch.stack([tensors[f"implicit_filter.{index}.bias"] for index in inner]),
        "freq": tensors["implicit_filter.1.freq"][0],
        "ffn_out": tensors[f"implicit_filter.{last}.weight"],
        "D": tensors["bias"].unsqueeze(0),
    }


def test_hyena_filter():
    tensors, wanted = golden("hyena"), golden("hyena", "filter")
    mixer = ImplicitLongConv(6, filter_length=20, filter_emb=5, filter_hidden_size=8, filter_freq=14, **WIDE)
    load(mixer, hyena_filter(wanted))
    assert_near(mixer.kernel(20, torch.float64)[0].T, wanted["h"])
    assert_near(mixer.kernel(12, torch.float64)[0].T, wanted["h_12"])
    assert_near(mixer(tensors["x"])[0], wanted["y"])
    assert_near(in_pieces(mixer, tensors["x"], [5, 1, 1, 13])[0], wanted["y"])


def test_hyena_filter_with_other_options():
    wanted = golden("hyena", "other")
    options = {"filter_emb": 3, "filter_hidden_size": 8, "filter_layers": 1, "filter_freq": 1}
    decay = {"fast_decay": 0.5, "slow_decay": 2.0, "decay_target": 0.05}
    mixer = ImplicitLongConv(6, filter_length=20, **options, **decay, **WIDE)
    load(mixer, hyena_filter(wanted))
    assert_near(mixer.kernel(20, torch.float64)[0].T, wanted["h"])


def test_hyena():
    """Order 2: the operator at its full length and a shorter one, in pieces, and its gradients."""
    tensors, wanted = golden("hyena"), golden("hyena", "operator")
    mixer = Hyena(6, filter_length=20, filter_emb=5, filter_hidden_size=8, filter_freq=14, **WIDE)

    def ours(prefix: str) -> Tensors:
        part = {key.removeprefix(prefix): value for key, value in wanted.items() if key.startswith(prefix)}
        inside = {key.removeprefix("filter_fn."): value for key, value in part.items() if key.startswith("filter_fn.")}
        if prefix:  # official modules share one frequency, whose gradient is listed once
            inside["implicit_filter.3.freq"] = inside["implicit_filter.1.freq"]
        projections = {key: part[key] for key in part if key.split(".")[0] in ("in_proj", "out_proj")}
        short = {"short_weight": part["short_filter.weight"][:, 0].flip(-1), "short_bias": part["short_filter.bias"]}
        filters = {f"filter.{key}": value for key, value in hyena_filter(inside).items()}
        return projections | short | filters

    load(mixer, ours(""))
    x = tensors["x"].requires_grad_()
    y, _ = mixer(x)
    assert_near(y, wanted["y"])
    assert_near(mixer(x[:, :13])[0], wanted["y_13"])
    assert_near(in_pieces(mixer, x.detach(), [5, 1, 1, 13])[0], wanted["y"])
    (y * tensors["weight"]).sum().backward()
    assert_near(x.grad, wanted["grad_x"])
    for name, gradient in ours("grad_").items():
        assert_near(mixer.get_parameter(name).grad, gradient)


def moving_average(part: str) -> tuple[EMA, Tensors]:
    tensors = golden("ema", part)
    directions, channels = tensors["delta"].shape[0] // 5, 5
    mixer = EMA(channels, state_size=4, bidirectional=directions == 2, block_size=8, **WIDE)
    shape = (directions, channels, 4)
    load(
        mixer,
        {name: tensors[name].view(shape) for name in ("delta", "alpha", "beta", "gamma")}
        | {"omega": tensors["omega"]},
    )
    return mixer, tensors


@pytest.mark.parametrize("part", ["causal", "two_sided"])
def test_moving_average(part):
    """Kernel, output and gradients."""
    everything = golden("ema")
    mixer, wanted = moving_average(part)
    for direction, kernel in enumerate(wanted["kernel"].split(5)):
        assert_near(mixer.kernel(21, torch.float64, direction)[0], kernel)
    x = everything["x"].transpose(0, 1).contiguous().requires_grad_()
    y, _ = mixer(x)
    assert_near(y.transpose(0, 1), wanted["y"])
    (y.transpose(0, 1) * everything["weight"]).sum().backward()
    assert_near(x.grad.transpose(0, 1), wanted["grad_x"])
    for name in ("delta", "alpha", "beta", "gamma", "omega"):
        gradient = mixer.get_parameter(name).grad
        assert_near(gradient.reshape(wanted[f"grad_{name}"].shape), wanted[f"grad_{name}"])


def test_moving_average_in_pieces_and_padded():
    mixer, wanted = moving_average("causal")
    x = golden("ema")["x"].transpose(0, 1)
    y, state = in_pieces(mixer, x, [9, 1, 1, 1, 9])
    assert_near(y.transpose(0, 1), wanted["incremental"])
    assert_near(state, wanted["state"])
    lengths = (~wanted["padding_mask"]).sum(1)
    padded, _ = mix(mixer, x, lengths=lengths)
    for row, length in enumerate(lengths):
        assert_near(padded[row, :length], wanted["padded"][:length, row])


@pytest.mark.parametrize(("order", "theta"), [(6, 20.0), (9, 7.5), (32, 100.0)])
def test_legendre_memory(order, theta):
    """Zero-order hold, impulse response, and the memory of a sequence by recurrence and by convolution."""
    wanted = golden("lmu", f"{order}_{theta:g}")
    assert_near(transition(order, theta), wanted["A"].T)
    response = impulse_response(order, theta, wanted["impulse_response"].shape[0])
    assert_near(response[:, :1], wanted["B"].T)
    assert_near(response, wanted["impulse_response"].T)
    y = legendre_memory(wanted["x"], order=order, theta=theta)[0].squeeze(-1)
    assert_near(y, wanted["memory"])
    assert_near(y, wanted["fft"])
    pieces, state, options = [], None, {"order": order, "theta": theta, "return_final_state": True}
    for piece in wanted["x"].split([9, 1, 1, wanted["x"].shape[1] - 11], 1):
        y, state = legendre_memory(piece, initial_state=state, **options)
        pieces.append(y)
    assert_near(torch.cat(pieces, 1).squeeze(-1), wanted["memory"])
    assert_near(state.squeeze(-1), wanted["memory"][:, -1])


def test_legendre_memory_of_channels():
    """The official cell keeps the memory of one channel after the other."""
    wanted = golden("lmu", "channels")
    y, _ = legendre_memory(wanted["x"], order=8, theta=12.0)
    assert_near(y.transpose(2, 3).flatten(2), wanted["memory"])
