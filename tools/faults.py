"""Faults made by hand, each once unnoticed, and the tests that must notice it: a list that anyone can check.

    python -m tools.faults                  make each in a copy, run its tests, say noticed or not noticed
    python -m tools.faults upcycle --list   only those whose file or text has the word; --list runs nothing

Exits with 1 if a fault is not noticed. To add one, name its file and its tests, and say what is replaced by what: a
text that the file has exactly once.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.faulty_copy import FaultyCopy

ROOT = Path(__file__).parents[1]
SRC = "src/hf_hybrid_ssm"
MODELS = f"{SRC}/models"


@dataclass(frozen=True)
class Fault:
    """In `file`, `old` becomes `new`; one of the `tests`, separated by spaces, must fail."""

    file: str
    tests: str
    old: str
    new: str

    def place(self, root: Path) -> int:
        """The character at which the replaced text begins.

        Raises:
            ValueError: the file does not have it, or more than once.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {count} times, not once.")
        return text.index(self.old)

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()} -> {self.new.strip() or 'nothing'}"


FAULTS = [
    # upcycling: the sign of a bias, the layers that are kept, what a student is told besides its weights
    Fault(f"{SRC}/upcycle/projections.py", "tests/upcycle/test_upcycle.py",
          "= shift, -shift",
          "= shift, shift"),
    Fault(f"{SRC}/upcycle/student.py", "tests/upcycle/test_upcycle.py",
          "    student.generation_config = copy.deepcopy(teacher.generation_config)\n",
          ""),
    Fault(f"{SRC}/upcycle/teacher_weights.py", "tests/upcycle/test_refused_teachers.py",
          "extra := [name for name in weights if name not in wanted]",
          "extra := []"),
    Fault(f"{SRC}/upcycle/layer_ranking.py", "tests/upcycle/test_layer_choice.py::"
          "test_sensitivity_keeps_the_layers_that_the_teacher_misses_most",
          "-scores[layer]",
          "scores[layer]"),
    Fault("recipes/upcycle.py", "tests/recipes/test_upcycle.py::"
          "test_the_result_is_an_ordinary_checkpoint_whose_card_names_the_teacher",
          "student.config.use_cache = True",
          "student.config.use_cache = False"),
    # what a Fourier transform costs: in the choice of a form, in plans, in the C kernel's pieces
    Fault("benchmarks/long_conv_costs.py", "tests/ops/test_long_conv.py::"
          "test_transforms_cost_two_and_a_half_n_log_n",
          "2 * 2.5 * points",
          "2.5 * points"),
    Fault(f"{SRC}/planning/operations.py", "tests/test_planning.py::"
          "test_fourier_transforms_and_scans_are_counted",
          "_fourier(shape, dims, 5.0)",
          "_fourier(shape, dims, 2.5)"),
    Fault(f"{SRC}/ops/implicit_attention/native.py", "tests/layers/test_lmu.py::"
          "test_transforms_cover_a_row",
          " * size[0] * size[0].bit_length()",
          " * size[0]"),
    # options that a layer forgets
    Fault(f"{MODELS}/spade/layers_spade.py", "tests/models/test_spade.py",
          "self.stop_gradient = config.ssm_stop_gradient",
          "self.stop_gradient = False"),
    Fault(f"{MODELS}/spade/modeling_spade.py", "tests/models/test_dropout.py",
          "nn.Dropout(config.classifier_dropout)",
          "nn.Dropout(0.0)"),
    Fault(f"{MODELS}/spade/layers_spade.py", "tests/models/test_dropout.py",
          "config.hidden_act], config.activation_dropout",
          "config.hidden_act], 0.0"),
    Fault(f"{MODELS}/bst/modeling_bst.py", "tests/models/test_dropout.py",
          "nn.Dropout(config.final_dropout)",
          "nn.Dropout(0.0)"),
    Fault(f"{MODELS}/lmu_isa/modeling_lmu_isa.py", "tests/models/test_dropout.py",
          "nn.Dropout(config.hidden_dropout)",
          "nn.Dropout(0.0)"),
    Fault(f"{MODELS}/heads.py", "tests/models/test_longhorn.py",
          "if shift_labels is None:",
          "if labels is not None:"),
    # constants and initial values
    Fault(f"{SRC}/layers/mixers/ema.py", "tests/layers/test_mixer_precision.py",
          'float32_parameters: ClassVar[tuple[str, ...]] = ("delta", "alpha", "beta"',
          'float32_parameters: ClassVar[tuple[str, ...]] = ("delta", "beta"'),
    Fault(f"{MODELS}/longhorn/modeling_longhorn.py", "tests/models/test_initial_values.py",
          "_uniform_fan_in(module.down_proj, self._residual_scale())",
          "_uniform_fan_in(module.down_proj, 1.0)"),
    Fault(f"{MODELS}/spade/modeling_spade.py", "tests/models/test_initial_values.py",
          "std=table.shape[1] ** -0.5",
          "std=table.shape[1] ** 0.5"),
    # caches
    Fault(f"{MODELS}/cache.py", "tests/models/test_longhorn.py",
          "        self.history.clear()\n        self.is_initialized = self.is_torn = False\n",
          "        self.is_initialized = self.is_torn = False\n"),
    Fault(f"{MODELS}/cache.py", "tests/models/test_decoding.py::test_static_cache",
          "for tensor in (*self.states.values(), self.seen_tokens):\n                tensor.zero_()",
          "for tensor in self.states.values():\n                tensor.zero_()"),
    Fault(f"{MODELS}/cache.py", "tests/models/test_decoding.py::"
          "test_rollback_keeps_the_gradient_mode_of_what_it_reads_again",
          "torch.set_grad_enabled(forward.with_gradient)",
          "torch.no_grad()"),
    Fault(f"{MODELS}/longhorn/modeling_longhorn.py", "tests/models/test_packed_pieces.py::"
          "test_generation_goes_on_with_the_last_document",
          "            position_ids=position_ids,\n            continues_documents=not",
          "            continues_documents=not"),
    # contexts and pages
    Fault(f"{SRC}/serving/fingerprint.py", "tests/serving/test_fingerprint.py",
          'WITHOUT_EFFECT = ("dropout", ',
          "WITHOUT_EFFECT = ("),
    Fault(f"{SRC}/serving/context.py", "tests/serving/test_fingerprint.py",
          "{name} {tensor.dtype} {tuple(tensor.shape)}",
          "{name} {tensor.dtype}"),
    Fault(f"{SRC}/serving/paged_states.py", "tests/serving/test_paged_states.py",
          "if 0 in requests.seen else None",
          "if requests.seen[0] == 0 else None"),
    Fault(f"{SRC}/serving/paged_states.py", "tests/serving/test_paged_states.py",
          "key=lambda state: (-state.dtype.itemsize, ",
          "key=lambda state: (state.dtype.itemsize, "),
    # plans, commands
    Fault(f"{SRC}/planning/training_step.py", "tests/test_planning_gathered.py",
          "2 * setup.computing * (largest + outside)",
          "setup.computing * (largest + outside)"),
    Fault(f"{SRC}/cli/generate.py", "tests/cli/test_refusals.py",
          '"temperature", "top_p", "top_k")',
          '"temperature", "top_p")'),
    Fault(f"{SRC}/cli/generate.py", "tests/cli/test_refusals.py",
          "tokenizer.eos_token if tokenizer.bos_token is None else tokenizer.bos_token",
          "tokenizer.eos_token"),
    # recipes: padding, measures, the order of streamed text
    Fault("recipes/sft.py", "tests/recipes/test_measures.py",
          'tokenizer.padding_side = "left"',
          'tokenizer.padding_side = "right"'),
    Fault("recipes/finetune_summarization.py", "tests/recipes/test_measures.py",
          "score[name].fmeasure",
          "score[name].precision"),
    Fault("recipes/finetune_glue.py", "tests/recipes/test_measures.py",
          "TASKS[name].measures[0]",
          "TASKS[name].measures[-1]"),
    Fault("recipes/_lib/rows.py", "tests/recipes/test_order_of_streams.py",
          "files = np.random.default_rng([self.seed, number])",
          "files = np.random.default_rng([self.seed, 0])"),
    Fault("recipes/_lib/rows.py", "tests/recipes/test_order_of_streams.py",
          "order = np.random.default_rng([self.seed or 0, number, worker])",
          "order = np.random.default_rng([self.seed or 0, 0, worker])"),
    Fault("recipes/_lib/rows.py", "tests/recipes/test_documents.py::test_workers_keep_the_order_of_documents",
          "for number in range(workers)]",
          "for number in reversed(range(workers))]"),
    # sums and edges of kernels, and what an optimizer keeps
    Fault(f"{SRC}/ops/causal_conv/native.c", "tests/ops/test_block_edges.py",
          "for (int64_t begin = 0; begin < L; begin += BLOCK) {",
          "for (int64_t begin = 0; begin < L - (L > 1 && L % BLOCK == 1); begin += BLOCK) {"),
    Fault(f"{SRC}/ops/linear_cross_entropy.py", "tests/ops/test_wide_sums.py",
          "dweight = torch.zeros_like(weight, dtype=dtype) if wants_weight else None",
          "dweight = torch.zeros_like(weight) if wants_weight else None"),
    Fault(f"{SRC}/ops/linear_kl_divergence.py", "tests/ops/test_wide_sums.py",
          "dweight = torch.zeros_like(weight, dtype=dtype) if wants_weight else None",
          "dweight = torch.zeros_like(weight) if wants_weight else None"),
    Fault(f"{SRC}/planning/training_step.py", "tests/test_planning.py::test_weights_and_optimizer",
          'if setup.optimizer == "adamw":',
          'if setup.optimizer in ("adamw", "sgd"):'),
    # what is kept of weights, derivatives of derivatives, statistics of batches
    Fault(f"{SRC}/layers/mixers/parameter_marks.py", "tests/layers/test_stale_kernels.py",
          "return self.values != self._memory(holder)",
          "return False"),
    Fault(f"{SRC}/layers/mixers/cached_kernel.py", "tests/layers/test_parametrized.py",
          "values = ((name, getattr(self, name, None)) for name in names)",
          "values = ((name, self._parameters.get(name)) for name in names)"),
    Fault(f"{SRC}/layers/mixers/s5.py", "tests/layers/test_stale_kernels.py",
          "self.clear_kernel_cache()  # as",
          "pass  # as"),
    Fault(f"{SRC}/ops/core/second_derivatives.py", "tests/ops/test_second_derivatives.py",
          "if not torch.is_grad_enabled():",
          "if True:"),
    Fault(f"{MODELS}/spade/layers_spade.py", "tests/models/test_batch_norm.py",
          "        if not repeats:\n            self._take_in",
          "        if True:\n            self._take_in"),
    Fault(f"{SRC}/ops/core/native_build.py", "tests/ops/test_native_library.py",
          "folder = folder.resolve(strict=True)",
          "folder = folder.absolute()"),
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", default="", help="of the faults to make")
    parser.add_argument("--list", action="store_true", help="show them and run nothing")
    arguments = parser.parse_args()
    chosen = [fault for fault in FAULTS if arguments.word in str(fault)]
    if not chosen:
        parser.error(f"no fault has {arguments.word!r} in its file or text.")
    if arguments.list:
        print("\n".join(map(str, chosen)))
        return 0
    unnoticed = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = FaultyCopy(ROOT, Path(folder))
        for fault in chosen:
            start = fault.place(ROOT)
            try:
                found = copy.notices(fault.file, start, start + len(fault.old), fault.new, fault.tests.split())
            except RuntimeError as error:
                found = False
                print(error)
            unnoticed += not found
            print(f"{'noticed' if found else 'NOT noticed'}: {fault}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} noticed")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main())
