"""State-space/attention hybrids for Hugging Face Transformers.

Importing the package registers its families with transformers' Auto classes; everything else is imported on first use.
"""

from hf_hybrid_ssm.auto import register
from hf_hybrid_ssm.lazy import attach
from hf_hybrid_ssm.models import FAMILIES
from hf_hybrid_ssm.students.family import FAMILY as STUDENT

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach(
    __name__,
    {name: family.package for family in (*FAMILIES, STUDENT) for name in family.names}
    | {
        "LowBitConfig": "hf_hybrid_ssm.precision",
        "compiled_decoding": "hf_hybrid_ssm.compiled",
        "register_family": "hf_hybrid_ssm.auto",
        "register_mixer": "hf_hybrid_ssm.layers.mixers.registry",
        "use_float32_products": "hf_hybrid_ssm.precision",
    },
)

register()
