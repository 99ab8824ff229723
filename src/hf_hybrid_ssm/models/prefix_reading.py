"""`generate(prefix_cache=...)`: what a text has in common with earlier ones is not read again."""

import logging
from functools import lru_cache, wraps
from typing import Any

from transformers import GenerationMixin

from hf_hybrid_ssm.models.connections import CONNECTIONS
from hf_hybrid_ssm.models.ended_rows import GenerationOfRowsThatEnd

logger = logging.getLogger(__name__)


class GenerationFromPrefixes(GenerationOfRowsThatEnd):
    """`generate` with a cache of states by prefix (`hf_hybrid_ssm.serving.PrefixCache`); placed before
    `GenerationMixin`."""

    @wraps(GenerationMixin.generate)
    def generate(self, *args: Any, prefix_cache: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """As in transformers.

        Args:
            prefix_cache (`hf_hybrid_ssm.serving.PrefixCache`, *optional*): states of earlier texts. The longest that
                this one begins with is continued; those of this text are added.
        """
        generate = super().generate
        if prefix_cache is not None:
            if not hasattr(prefix_cache, "generate"):
                raise TypeError(f"prefix_cache must be a PrefixCache, got {type(prefix_cache).__name__}.")
            return prefix_cache.generate(self, generate, args, kwargs)
        find = CONNECTIONS.prefix_cache_of_process
        shared = None if find is None else find()
        reason = None if shared is None else shared.why_not(self, args, kwargs)
        if reason is not None:
            say_once(reason)
        if shared is None or reason is not None:
            return generate(*args, **kwargs)
        return shared.generate(self, generate, args, kwargs)


@lru_cache(maxsize=64)
def say_once(reason: str) -> None:
    """Warn that a cache of prefixes steps aside: a text that is read anew looks like any other."""
    logger.warning("prefix_cache does not serve a call of generate, which reads its whole text: %s", reason)
