"""Which tests belong to which part of the sources: those that a change of the part should fail, and no more.

The longest prefix of a file's path counts, below src/hf_hybrid_ssm or in recipes/. Left out are tests in which every
process compiles for minutes or starts others that load everything again: their promises are held by cheaper ones too.
"""

from pathlib import Path

PACKAGE = "src/hf_hybrid_ssm"
_OPS = {
    "ops/": "test_dispatch test_steps",
    "ops/core/": "test_dispatch test_self_check test_custom_ops test_transforms test_native_library test_linear_scan",
    "ops/core/blocks.py": "test_linear_scan test_long_conv",
    "ops/core/checks.py": "test_causal_conv test_linear_scan test_long_conv",
    "ops/core/output_positions.py": "test_linear_scan test_long_conv",
    "ops/core/packed_sequences.py": "test_transforms",
    "ops/core/padding.py": "test_causal_conv test_longhorn_scan test_linear_scan",
    "ops/core/rows.py": "test_rows test_causal_conv test_longhorn_scan test_linear_scan",
    "ops/core/triton_helpers.py": "test_triton",
    "ops/causal_conv/": "test_causal_conv test_steps",
    "ops/linear_cross_entropy.py": "test_linear_cross_entropy",
    "ops/linear_scan/": "test_linear_scan test_linear_scan_kernels test_steps",
    "ops/local_attention/": "test_local_attention test_flex_attention test_steps",
    "ops/long_conv/": "test_long_conv",
    "ops/longhorn_scan/": "test_longhorn_scan test_steps",
}
_LMU = "tests/layers/test_lmu.py tests/ops/test_transforms.py"
_TRITON = "tests/ops/test_triton.py"
_MIXERS = "tests/layers/test_mixers.py tests/layers/test_mixer_training.py tests/layers/test_initial_values.py"
_SPADE = "tests/models/test_spade.py tests/golden/test_spade.py"
_BST = "tests/models/test_bst.py tests/models/test_bst_checks.py tests/golden/test_block_transformers.py"
_LONGHORN = "tests/models/test_longhorn.py tests/golden/test_longhorn.py"
_MODELS = "tests/models/test_every_family.py tests/models/test_model_interface.py"
_HUB = "tests/hub/test_export.py tests/hub/test_folder.py"
TESTS = {prefix: " ".join(f"tests/ops/{name}.py" for name in names.split()) for prefix, names in _OPS.items()} | {
    "ops/implicit_attention/": _LMU,
    "ops/legendre_memory/": _LMU,
    **{f"ops/{op}/triton": _TRITON for op in ("causal_conv", "linear_scan", "long_conv", "implicit_attention")},
    "ops/longhorn_scan/triton": f"{_TRITON} tests/ops/test_longhorn_chunks.py",
    "ops/local_attention/flex_attention.py": "tests/ops/test_flex_attention.py",
    "layers/": f"{_MIXERS} {_SPADE}",
    "layers/float32_parameters.py": "tests/layers/test_mixer_precision.py tests/layers/test_initial_values.py",
    "layers/relative_bias.py": f"{_SPADE} {_BST}",
    "layers/mixers/": f"{_MIXERS} tests/golden/test_state_spaces.py",
    "layers/mixers/s4.py": f"{_MIXERS} tests/layers/test_s4_kernel.py",
    "models/": _MODELS,
    "models/bst/": _BST,
    "models/cache.py": f"tests/models/test_decoding.py {_LONGHORN} {_MODELS}",
    "models/configuration.py": "tests/models/test_configurations.py",
    "models/connections.py": f"tests/test_packaging.py {_HUB}",
    "models/families.py": f"tests/models/test_model_interface.py {_HUB}",
    "models/heads.py": "tests/models/test_classifiers.py tests/models/test_span_and_token_heads.py"
    " tests/models/test_masked_lm.py",
    "models/inputs.py": f"tests/models/test_packed_pieces.py {_MODELS}",
    "models/lmu_isa/": "tests/models/test_lmu_isa.py tests/layers/test_lmu.py",
    "models/longhorn/": _LONGHORN,
    "models/longhorn/convert_official_checkpoint.py": "tests/models/test_longhorn_conversion.py",
    "models/official_state_dict.py": "tests/models/test_longhorn_conversion.py tests/models/test_spade_conversion.py",
    "models/packing.py": "tests/models/test_packed_pieces.py",
    "models/spade/": _SPADE,
    "models/ssm_configuration.py": "tests/models/test_configurations.py",
    "models/spade/base_of_checkpoint.py": "tests/hub/test_base_of_exported.py tests/models/test_spade.py",
    "models/spade/convert_official_checkpoint.py": "tests/models/test_spade_conversion.py"
    " tests/golden/test_spade_model.py",
    "models/spade/convert_official_seq2seq.py": "tests/golden/test_spade_seq2seq.py",
    "models/spade/modeling_spade_seq2seq.py": f"tests/models/test_spade.py {_MODELS}",
    "models/spade/official_s4.py": "tests/models/test_spade_conversion.py tests/golden/test_state_spaces.py",
    "training/": "tests/test_optim.py",
    "training/memory.py": "tests/test_memory_of_training.py",
    "training/resume.py": "tests/reliability/test_crash.py",
    "training/sequence_parallel.py": "tests/distributed/test_sequence_parallel.py",
    "training/warm_start.py": "tests/test_warm_start.py",
    "upcycle/": "tests/upcycle",
    "planning/": "tests/test_planning.py",
    "hub/": _HUB,
    "hub/cards.py": "tests/hub/test_cards.py",
    "hub/kernels.py": "tests/hub/test_kernels.py",
    "serving/": "tests/serving/test_context.py tests/serving/test_paged_states.py tests/serving/test_vllm_plugin.py",
    "evaluation/": "tests/evaluation/test_harness.py",
    "evaluation/intervals.py": "tests/evaluation/test_position_loss.py",
    "evaluation/position_loss.py": "tests/evaluation/test_position_loss.py",
    "evaluation/recall_tasks/": "tests/evaluation/test_recall_tasks.py",
    "evaluation/teacher_scored.py": "tests/evaluation/test_position_loss.py",
    "cli/": "tests/cli/test_commands.py tests/cli/test_refusals.py",
    "cli/read.py": "tests/serving/test_context.py",
    "cli/recipe.py": "tests/cli/test_recipe_command.py",
    "cli/run.py": "tests/cli/test_registration.py",
    "cli/enable.py": "tests/cli/test_registration.py",
    "cli/disable.py": "tests/cli/test_registration.py",
    "auto.py": f"tests/models/test_model_interface.py {_HUB}",
    "doctor.py": "tests/test_doctor.py",
    "lazy.py": "tests/test_packaging.py",
    "": "tests/test_packaging.py",
}
_RECIPES = {
    "_lib/": "test_documents test_settings test_pretrain_clm",
    "_lib/chat.py": "test_sft",
    "_lib/checks.py": "test_checks",
    "_lib/lra_data.py": "test_lra",
    "_lib/entry.py": "test_entry",
    "_lib/intervals.py": "test_compare test_rare_words",
    "_lib/peers.py": "test_peers",
    "_lib/plotting.py": "test_plotting",
    "_lib/progress.py": "test_progress",
    "_lib/provenance.py": "test_provenance",
    "_lib/publishing.py": "test_publish_checkpoint",
    "_lib/rows.py": "test_documents test_order_of_streams",
    "_lib/segments.py": "test_segments",
    "_lib/settings.py": "test_settings test_checks",
    "_lib/span_corruption.py": "test_pretrain_seq2seq",
    "_lib/sweeps.py": "test_sweeps",
    "_lib/token_masking.py": "test_pretrain_mlm",
    "_lib/word_stream.py": "test_word_lm",
    "compare.py": "test_compare",
    "compare_lra.py": "test_lra",
    "evaluate_lm.py": "test_pretrain_clm test_checks",
    "finetune_glue.py": "test_finetune_glue test_measures",
    "finetune_summarization.py": "test_finetune_summarization test_measures",
    "first_token_recall.py": "test_first_token_recall",
    "glue_baselines.py": "test_glue_baselines",
    "length_extrapolation.py": "test_length_extrapolation",
    "listops.py": "test_lra",
    "lm_eval_table.py": "test_lm_eval_table",
    "lra.py": "test_lra",
    "mqar.py": "test_mqar",
    "per_token_loss.py": "test_scaling_law test_checks",
    "pretrain_clm.py": "test_pretrain_clm test_segments",
    "pretrain_mlm.py": "test_pretrain_mlm",
    "pretrain_seq2seq.py": "test_pretrain_seq2seq",
    "publish_checkpoint.py": "test_publish_checkpoint",
    "rare_words.py": "test_rare_words",
    "scaling_law.py": "test_scaling_law",
    "sft.py": "test_sft test_measures",
    "train_tokenizer.py": "test_documents",
    "upcycle.py": "test_upcycle",
    "upcycling_gaps.py": "test_upcycle",
    "upcycling_recall.py": "test_upcycling_recall",
    "upcycling_report.py": "test_upcycling_report",
    "word_lm.py": "test_word_lm",
    "demo.py": "test_checks test_documents",
}
PARTS = {f"{PACKAGE}/{prefix}": tests.split() for prefix, tests in TESTS.items()} | {
    f"recipes/{prefix}": [f"tests/recipes/{name}.py" for name in names.split()] for prefix, names in _RECIPES.items()
}
"""Prefix of a path → test files."""
SCOPES = {
    "all": (f"{PACKAGE}/", "recipes/"),
    "src": (f"{PACKAGE}/",),
    "recipes": ("recipes/",),
    "ops": (f"{PACKAGE}/ops/", f"{PACKAGE}/models/cache.py"),
}
"""What can be asked for by a name; a prefix of a path will do as well."""
BESIDE_OPS = ("triton", "flex_attention", "native")
"""Files of ops that the scope "ops" leaves out, by how they begin: kernels, and what calls them."""


def relevant_tests(file: str) -> list[str]:
    """The tests of a source file.

    Raises:
        KeyError: it belongs to no part.
    """
    return PARTS[max((prefix for prefix in PARTS if file.startswith(prefix)), key=len, default=file)]


def files_in(root: Path, scope: str) -> list[str]:
    """The Python files of a scope, or of a prefix of their paths, below `root`."""
    prefixes = SCOPES.get(scope, (scope,))
    folders = [root / PACKAGE, root / "recipes"]
    found = (path.relative_to(root).as_posix() for folder in folders for path in sorted(folder.rglob("*.py")))
    files = [file for file in found if file.startswith(prefixes)]
    if scope == "ops":
        files = [file for file in files if not Path(file).name.startswith(BESIDE_OPS)]
    return files
