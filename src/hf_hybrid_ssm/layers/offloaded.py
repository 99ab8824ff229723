"""Methods beside `forward` that read parameters, on a module whose parameters accelerate keeps elsewhere."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def fetches_weights(method: Method) -> Method:
    """Let `method` of a module find its parameters, wherever they are.

    accelerate (`device_map` with memory for a part of the model, `disk_offload`) leaves parameters on the meta device
    and brings them in around `forward` alone. A mixer's `step` is called from outside as well: there the same hook
    runs around it. Within `forward` the parameters are in place, and nothing more happens.
    """

    @functools.wraps(method)
    def fetching(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook = getattr(self, "_hf_hook", None)
        if hook is None or not any(parameter.is_meta for parameter in self.parameters(recurse=False)):
            return method(self, *args, **kwargs)
        args, kwargs = hook.pre_forward(self, *args, **kwargs)
        return hook.post_forward(self, method(self, *args, **kwargs))

    return fetching  # type: ignore[return-value]
