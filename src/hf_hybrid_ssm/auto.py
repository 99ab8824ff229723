"""Registration of the families with transformers' Auto classes, with PEFT, and of what loading and saving call.

transformers finds its own families by name and imports a family's code when it is first asked for. Ours enter the same
tables in the same form, so that `import hf_hybrid_ssm` imports neither torch nor any modeling file, and so that the
places which read the tables of class names (label smoothing in `Trainer`, lm-eval) know our classes.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hf_hybrid_ssm.models import FAMILIES, OTHERS, owner_of
from hf_hybrid_ssm.models.family import Family
from hf_hybrid_ssm.students.family import FAMILY as STUDENT
from hf_hybrid_ssm.tested_versions import warn_of_untested_transformers

logger = logging.getLogger(__name__)
CONFIGURATION = "hf_hybrid_ssm.models.configuration"  # that of every family is derived from what it defines


def register_family(family: Family) -> None:
    """Make a family of your own known to the Auto classes, `pipeline`, PEFT, model cards and planning, as those of
    this package are. Its code is not exported with checkpoints.

    Args:
        family: its declaration. One of the same model type and package takes the place of an earlier one, as when the
            cell of a notebook is run again.

    Raises:
        TypeError: `family` is not a `Family`.
        ValueError: the model type is that of another family or of transformers, a head has no Auto class, or the
            package lacks a class.
    """
    if not isinstance(family, Family):
        raise TypeError(f"family must be a Family (hf_hybrid_ssm.models.family), got {type(family).__name__}.")
    earlier = next((known for known in FAMILIES if known.model_type == family.model_type), None)
    owner = owner_of(family) if earlier is None else earlier.package
    if owner not in (None, family.package):
        raise ValueError(f"model_type={family.model_type!r} is taken, by {owner}; choose another.")
    modeling_auto = importlib.import_module("transformers.models.auto.modeling_auto")
    for table in family.heads:
        if not hasattr(modeling_auto, f"{table}_MAPPING"):
            raise ValueError(f"heads[{table!r}]: transformers has no {table}_MAPPING.")
    package = importlib.import_module(family.package)
    if missing := [name for name in (*family.names, family.base) if not hasattr(package, name)]:
        raise ValueError(f"package={family.package!r} has no {', '.join(missing)}.")
    FAMILIES[:] = [known for known in FAMILIES if known is not earlier] + [family]
    register()


def _free_families() -> Iterator[Family]:
    for family in (*FAMILIES, *OTHERS):
        owner = owner_of(family)
        if owner is None:
            yield family
        else:
            logger.warning(
                "transformers has a model type %r of its own (%s); it is kept, and the classes of %s are only "
                "reachable by importing them.",
                family.model_type,
                owner,
                family.package,
            )


def _name_in_library(_: ModuleType) -> None:
    """`transformers.LonghornForCausalLM`: servers and pipelines look a class up by the name in `config.json`.

    The library finds a name in one of its modules, which it imports when the name is first asked for; one stands for
    each family. Names of its own stay its own.
    """
    library = sys.modules["transformers"]  # which replaces itself while it is imported
    warn_of_untested_transformers(library.__version__)
    for family in (*FAMILIES, *OTHERS):
        module = f"hf_hybrid_ssm_{family.model_type}"
        sys.modules[f"transformers.{module}"] = importlib.import_module(family.package)
        for name in family.names:
            library._class_to_module.setdefault(name, module)


def _register_configs(configuration_auto: ModuleType) -> None:
    for family in _free_families():
        configuration_auto.CONFIG_MAPPING._modules[family.model_type] = importlib.import_module(family.package)
        configuration_auto.CONFIG_MAPPING_NAMES[family.model_type] = family.config


def _register_models(modeling_auto: ModuleType) -> None:
    for family in _free_families():
        for table, class_name in family.heads.items():
            mapping = getattr(modeling_auto, f"{table}_MAPPING")
            mapping._modules[family.model_type] = importlib.import_module(family.package)
            mapping._reverse_config_mapping[family.config] = family.model_type
            getattr(modeling_auto, f"{table}_MAPPING_NAMES")[family.model_type] = class_name


def _register_cache_layers(_: ModuleType) -> None:
    """A cache may be made from a configuration alone, before any model is imported; not before a configuration is."""
    if CONFIGURATION in sys.modules and "transformers.cache_utils" in sys.modules:
        importlib.import_module("hf_hybrid_ssm.models.state_layers")


def _register_low_bits(_: ModuleType) -> None:
    """A folder with rounded weights loads without an import of its configuration."""
    importlib.import_module("hf_hybrid_ssm.precision")


def _register_peft_targets(constants: ModuleType) -> None:
    """`LoraConfig()` alone works for every family; what PEFT itself knows of a model type stays.

    The tables of the methods like LoRA are those that agree with LoRA's on Llama.
    """
    lora = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    tables = [table for name, table in vars(constants).items() if name.endswith("_TARGET_MODULES_MAPPING")]
    ia3 = constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING
    feed_forward = constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING
    for family in (*FAMILIES, *OTHERS):
        for table in tables:
            if table.get("llama") == lora["llama"]:
                table.setdefault(family.model_type, list(family.peft.lora))
        ia3.setdefault(family.model_type, list(family.peft.ia3))
        feed_forward.setdefault(family.model_type, list(family.peft.ia3_feed_forward))


def _generate(model: Any, usual: Callable, prefix_cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if prefix_cache is None and not any(name.startswith("HF_HYBRID_SSM_PREFIX_CACHE") for name in os.environ):
        return usual(*args, **kwargs)  # as nearly always, and then nothing more is imported
    return importlib.import_module("hf_hybrid_ssm.serving.prefix_cache").generate(
        model, usual, prefix_cache, args, kwargs
    )


def _exporting() -> ModuleType:
    return importlib.import_module("hf_hybrid_ssm.hub.export")


def _fill_hooks(configuration: ModuleType) -> None:
    hooks = configuration.HOOKS
    hooks.generate = _generate
    # all of these import what they call when they are first called
    hooks.check_configuration = lambda *args: importlib.import_module(
        "hf_hybrid_ssm.hub.saved_configuration"
    ).check_saved_configuration(*args)
    hooks.load = lambda *args, **kwargs: importlib.import_module("hf_hybrid_ssm.hub.loading").load(*args, **kwargs)
    hooks.save_configuration = lambda *args, **kwargs: _exporting().save_configuration(*args, **kwargs)
    hooks.choose_code = lambda *args: _exporting().choose_code(*args)
    _register_cache_layers(configuration)


_REGISTRATIONS: dict[str, Callable[[ModuleType], None]] = {
    "peft.utils.constants": _register_peft_targets,
    "transformers": _name_in_library,
    "transformers.processing_utils": _name_in_library,  # which puts a second module of the library in its place
    "transformers.cache_utils": _register_cache_layers,
    CONFIGURATION: _fill_hooks,
    "transformers.quantizers.auto": _register_low_bits,
    "transformers.models.auto.configuration_auto": _register_configs,
    "transformers.models.auto.modeling_auto": _register_models,
}


class _RegisteringLoader(Loader):
    """Runs the module's own loader, then our registration."""

    def __init__(self, loader: Loader):
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _REGISTRATIONS[module.__name__](module)


class _RegisteringFinder(MetaPathFinder):
    """Waits for the modules of `_REGISTRATIONS` to be imported; does nothing else, finds nothing itself."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in _REGISTRATIONS:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((each for each in others if each is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


def register() -> None:
    """Make every family known to `AutoConfig`, `AutoModel` and the heads; called when the package is imported.

    Calling it again changes nothing. A model type that transformers itself owns is never taken over.
    """
    if STUDENT not in OTHERS:
        OTHERS.append(STUDENT)
    # first: what is registered below may import another of these modules
    if not any(isinstance(finder, _RegisteringFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisteringFinder())
    for name, registration in _REGISTRATIONS.items():
        if name in sys.modules:
            registration(sys.modules[name])
