"""The model families, one folder each, organised as in transformers; here is the table of those of this package and
those that were registered from outside.

Reading it imports neither torch nor any modeling file.
"""

import importlib

from hf_hybrid_ssm.models.family import Family

# the folders of the families beside this file; each declares itself in its `__init__.py`
FOLDERS = (
    "longhorn",
    "bst",
    "lmu_isa",
    "spade",
)
FAMILIES: list[Family] = [
    family for folder in FOLDERS for family in importlib.import_module(f"hf_hybrid_ssm.models.{folder}").FAMILIES
]
OTHERS: list[Family] = []
"""Model types that are no family of their own: students, which the level above adds."""


def family_of(model_type: str) -> Family:
    """The declaration of a model type.

    Raises:
        ValueError: no family of this package has that type.
    """
    for family in (*FAMILIES, *OTHERS):
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in (*FAMILIES, *OTHERS))
    raise ValueError(f"model_type={model_type!r} is not a family of hf_hybrid_ssm; its families are {known}.")


def owner_of(family: Family) -> str | None:
    """The configuration class of transformers' own that has the family's model type; None if the name is ours."""
    configuration_auto = importlib.import_module("transformers.models.auto.configuration_auto")
    registered = configuration_auto.CONFIG_MAPPING._modules.get(family.model_type)
    is_ours = getattr(registered, "__name__", None) == family.package
    return None if is_ours else configuration_auto.CONFIG_MAPPING_NAMES.get(family.model_type)
