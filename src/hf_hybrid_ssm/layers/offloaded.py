"""Methods besides `forward` that read parameters which accelerate or FSDP keeps elsewhere between calls."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def with_accelerate_hooks(method: Method) -> Method:
    """Make `method` of a module fetch its parameters, wherever they are.

    accelerate (`device_map` with memory for a part of the model, `disk_offload`) leaves parameters on the meta device,
    and FSDP2 leaves a shard of them on each device; both bring them in around `forward` alone. Longhorn's
    `forward_rows` is also called from outside of its module's `forward`: by a block that has a mixer and a window side
    by side, and by a rollback, which begins with the layer's inputs. There the same hooks run around it. Within
    `forward` the parameters are in place, and nothing more happens.

    transformers' `force_accelerate_hooks` does not serve: it runs the hooks of named submodules around the `forward`
    of their parent, whether they are needed or not; it leaves the arguments where they are, and FSDP2 to itself.
    """

    @functools.wraps(method)
    def with_hooks(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self, "unshard") and _is_sharded(self):
            from torch.distributed.fsdp import register_fsdp_forward_method

            register_fsdp_forward_method(self, method.__name__)  # from now on, FSDP gathers before it comes here
            return getattr(self, method.__name__)(*args, **kwargs)
        hook = getattr(self, "_hf_hook", None)
        if hook is None or not any(parameter.is_meta for parameter in self.parameters(recurse=False)):
            return method(self, *args, **kwargs)
        args, kwargs = hook.pre_forward(self, *args, **kwargs)
        return hook.post_forward(self, method(self, *args, **kwargs))

    return with_hooks  # type: ignore[return-value]


def _is_sharded(module: Any) -> bool:
    """Whether parameters of a unit of FSDP are not gathered; those of a unit inside wait for its own `forward`."""
    from torch.distributed.tensor import DTensor

    inside = (part for part in module.children() if not hasattr(part, "unshard"))
    own = module.parameters(recurse=False)
    return any(isinstance(parameter, DTensor) for parameter in own) or any(map(_is_sharded, inside))
