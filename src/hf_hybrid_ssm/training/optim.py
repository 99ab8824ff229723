"""Which parameters are decayed, which have their own learning rate, and Muon for those that are hidden matrices."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_hybrid_ssm.layers.plain_tensors import check_whole, whole_shape


def parameter_groups(model: nn.Module, weight_decay: float, *, lr: float | None = None) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: `torch.optim.AdamW(parameter_groups(model, 0.1, lr=1e-3))`.

    Tensors with two or more dimensions are decayed; norms, biases (also several in one tensor, such as T5's relative
    ones: the name of the parameter or of its module says so) and other vectors are not. A parameter can override this
    with an attribute `_optim`, and a module for its own parameters with a method `optimizer_options(name)`, as the
    state-space mixers do: a dict of optimizer options such as `{"lr": 1e-3, "weight_decay": 0.0}`. The module's
    options also apply after FSDP has replaced the parameters by shards. Frozen parameters are left out; tied ones
    appear once. The order depends only on the model, so that a saved optimizer state can be loaded.

    Args:
        model: the model to train.
        weight_decay: of the decayed parameters, ≥ 0.
        lr: learning rate of parameters without their own; `None` leaves it to the optimizer.

    Returns:
        One dict for each distinct set of options, with `params` and those options.

    Raises:
        ValueError: `weight_decay` or `lr` is negative, or the model has no trainable parameters.
    """
    if weight_decay < 0:
        raise ValueError(f"weight_decay={weight_decay} must be at least 0.")
    if lr is not None and lr < 0:
        raise ValueError(f"lr={lr} must be at least 0.")
    groups: dict[tuple, dict[str, Any]] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            is_bias = any("bias" in part for part in (name, path.rpartition(".")[2]))
            decay = weight_decay if len(whole_shape(parameter)) >= 2 and not is_bias else 0.0
            options = _options(module, name, parameter, decay, lr)
            group = groups.setdefault(tuple(sorted(options.items())), {"params": [], **options})
            group["params"].append(parameter)
    if not groups:
        raise ValueError(f"{type(model).__name__} has no parameter with requires_grad=True.")
    return list(groups.values())


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for the weights of hidden linear maps, AdamW for all other trained parameters.

    Muon (K. Jordan, 2024) steps by about the nearest semi-orthogonal matrix to the momentum, which torch computes in
    bfloat16. It is for maps between hidden states: the weights of `nn.Linear` (and transformers' `Conv1D`) in the base
    model. Embeddings, heads, norms, biases, short convolutions and a state-space model's own parameters are AdamW's,
    with the groups and rates of `parameter_groups`. Muon's steps are scaled to the root mean square of AdamW's
    (Moonlight, arXiv 2502.16982), so that both take one rate and one decay. `Trainer(...,
    optimizers=(MuonAdamW(model, lr=1e-3), None))` takes it, and so do torch's schedulers.

    Args:
        model: the model to train. torch gathers the shards of `fully_shard` (FSDP2) for Muon's steps, and refuses
            parameters that something has flattened.
        lr: learning rate.
        weight_decay: of Muon's matrices and of those parameters that AdamW decays.
        momentum: Muon's, in [0, 1).
        betas: AdamW's.
        eps: AdamW's.

    Raises:
        ValueError: an argument is out of range, the model has no such map that is trained, or DeepSpeed has
            partitioned it.
        ImportError: torch is older than 2.9, which has no Muon.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ):
        if not has_muon():
            raise ImportError(f"torch {torch.__version__} has no Muon; torch 2.9 does.")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum} must be at least 0 and below 1.")
        check_whole(model, "MuonAdamW")
        matrices = _hidden_matrices(model)
        chosen: tuple[list, list] = ([], [])
        for group in parameter_groups(model, weight_decay, lr=lr):
            for kind in (True, False):
                if parameters := [one for one in group["params"] if (id(one) in matrices) is kind]:
                    chosen[kind].append({**group, "params": parameters, "is_muon": kind})
        if not chosen[True]:
            raise ValueError(f"{type(model).__name__} has no trained nn.Linear in its base model, which Muon is for.")
        rest = chosen[False] or [{"params": [], "lr": lr, "weight_decay": 0.0, "is_muon": False}]
        self._parts = (
            torch.optim.AdamW(rest, betas=betas, eps=eps),
            torch.optim.Muon(chosen[True], momentum=momentum, adjust_lr_fn="match_rms_adamw"),
        )
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """A group is AdamW's unless it has `is_muon`."""
        part = self._parts[bool(param_group.get("is_muon"))]
        super().add_param_group({**part.defaults, "is_muon": False, **param_group})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of both; `closure()`, if given, computes the loss anew, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for kind, part in enumerate(self._parts):  # they see what a scheduler or `load_state_dict` has replaced
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group["is_muon"] == kind]
            part.step()
        return loss


def has_muon() -> bool:
    """Whether torch has Muon: from 2.9 on."""
    return hasattr(torch.optim, "Muon")


def _hidden_matrices(model: nn.Module) -> set[int]:
    """The identities of the parameters that are Muon's, whatever is wrapped around the model."""
    others: set[nn.Module] = set()
    seen: set[nn.Module] = set()  # a model may hold models, such as an encoder
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part not in seen:
            seen |= set(part.modules())
            others |= set(part.modules()) - set(part.base_model.modules())  # heads
            others |= set(part.get_input_embeddings().modules())
    hidden = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D) and module not in others]
    return {id(module.weight) for module in hidden}


def _options(
    module: nn.Module, name: str, parameter: torch.Tensor, weight_decay: float, lr: float | None
) -> dict[str, Any]:
    options: dict[str, Any] = {"weight_decay": weight_decay}
    if lr is not None:
        options["lr"] = lr
    if callable(own := getattr(module, "optimizer_options", None)):
        options |= own(name)
    return options | getattr(parameter, "_optim", {})
