"""Every way in which torch lets the weights of a module change, for tests that nothing computed from them is kept."""

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

Values = dict[str, torch.Tensor]


def _by_optimizer(module: nn.Module, values: Values) -> None:
    parameters = {name: module.get_parameter(name) for name in values}
    trained = [parameter.requires_grad for parameter in parameters.values()]
    for name, parameter in parameters.items():
        parameter.requires_grad_(True).grad = parameter.detach() - values[name]
    torch.optim.SGD(parameters.values(), lr=1.0).step()
    for parameter, trains in zip(parameters.values(), trained):
        parameter.grad = None
        parameter.requires_grad_(trains)


def _by_name(change):
    def of_all(module: nn.Module, values: Values) -> None:
        for name, value in values.items():
            change(module.get_parameter(name), value.clone())

    return of_all


def _assign_data(parameter: torch.Tensor, value: torch.Tensor) -> None:
    parameter.data = value


def _without_version(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """As FSDP gathers: into the same memory, and the parameter's version stays."""
    with torch.autograd._unsafe_preserve_version_counter(parameter):
        parameter.copy_(value)


def _replace(module: nn.Module, values: Values) -> None:
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        trains = getattr(owner, leaf).requires_grad
        setattr(owner, leaf, nn.Parameter(value.clone(), requires_grad=trains))


def _from_vector(module: nn.Module, values: Values) -> None:
    vector = parameters_to_vector(values.values())
    vector_to_parameters(vector, [module.get_parameter(name) for name in values])


WAYS = {
    "data.copy_": _by_name(lambda parameter, value: parameter.data.copy_(value)),
    "copy_": _by_name(lambda parameter, value: parameter.copy_(value)),
    "mul_ and add_": _by_name(lambda parameter, value: parameter.mul_(0).add_(value)),
    "foreach": lambda module, values: torch._foreach_copy_(
        [module.get_parameter(name) for name in values], list(values.values())
    ),
    "data.index": _by_name(lambda parameter, value: parameter.data.__setitem__(..., value)),
    "data = tensor": _by_name(_assign_data),
    "data = strided tensor": _by_name(
        lambda parameter, value: _assign_data(parameter, value.unsqueeze(-1).repeat_interleave(2, -1)[..., 0])
    ),
    "numpy view": _by_name(lambda parameter, value: parameter.detach().numpy().__setitem__(..., value.numpy())),
    "storage": _by_name(lambda parameter, value: parameter.untyped_storage().copy_(value.untyped_storage())),
    "set_": _by_name(lambda parameter, value: parameter.set_(value)),
    "swap_tensors": _by_name(
        lambda parameter, value: torch.utils.swap_tensors(
            parameter, nn.Parameter(value, requires_grad=parameter.requires_grad)
        )
    ),
    "no version": _by_name(_without_version),
    "optimizer": _by_optimizer,
    "load_state_dict": lambda module, values: module.load_state_dict(values, strict=False),
    "load_state_dict(assign=True)": lambda module, values: module.load_state_dict(values, strict=False, assign=True),
    "setattr": _replace,
    "vector_to_parameters": _from_vector,
}


def changed_values(module: nn.Module, seed: int = 0) -> Values:
    """New values of all parameters, some percent away from the present ones."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: parameter.detach() * (1 + 0.1 * torch.rand(parameter.shape, generator=generator).to(parameter)) + 0.01
        for name, parameter in module.named_parameters()
    }
