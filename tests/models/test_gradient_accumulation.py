"""One step of the `Trainer` is the same in one batch and in micro-batches, whatever number of targets each row has."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

import hf_hybrid_ssm
from hf_hybrid_ssm.models.classifiers import cross_entropy, sequence_classification_loss
from tests.tiny_models import classes_of, config_of, ids_of

ROWS, LENGTH, CLASSES = 4, 9, 3
# each class of each family once; the adaptive vocabulary has a loss of its own
VARIANTS = ["longhorn", "bst sh s4d", "bst s5 bidirectional", "lmu-isa", "spade s4 window", "spade adaptive"]
VARIANTS += ["encoder-decoder"]
CASES = [(variant, name) for variant in VARIANTS for name in classes_of(variant) if "For" in name]


def batch_for(class_name: str) -> dict[str, torch.Tensor]:
    """Rows with 0, 1, ... targets, each where the class has several of a row; else one of the rows has none."""
    ids, columns = ids_of(ROWS, LENGTH), torch.arange(LENGTH)
    if "MultipleChoice" in class_name:
        return {"input_ids": ids_of(ROWS, CLASSES, LENGTH), "labels": torch.tensor([2, -100, 0, 1])}
    if "SequenceClassification" in class_name:
        return {"input_ids": ids, "labels": torch.tensor([2, -100, 0, 1])}
    if "QuestionAnswering" in class_name:  # a position beyond the row is none
        ends = {"start_positions": torch.tensor([0, 12, 3, 5]), "end_positions": torch.tensor([4, 12, 12, 6])}
        return {"input_ids": ids, **ends}
    few = columns < torch.tensor([[1], [4], [7], [9]])
    return {"input_ids": ids, "labels": torch.where(few, ids % CLASSES if "Token" in class_name else ids, -100)}


def trainer_of(class_name: str, config, folder, batch_size: int) -> Trainer:
    torch.manual_seed(0)
    model = getattr(hf_hybrid_ssm, class_name)(config).double()
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=ROWS // batch_size,
        use_cpu=True,
        report_to="none",
    )
    return Trainer(model, arguments)


def step(trainer: Trainer, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss that the `Trainer` would log for one step over all rows, and its gradients."""
    size = trainer.args.per_device_train_batch_size
    parts = [{name: x[first : first + size] for name, x in batch.items()} for first in range(0, ROWS, size)]
    samples, count = trainer.get_batch_samples(iter(parts), len(parts), trainer.args.device)
    trainer.current_gradient_accumulation_steps = len(samples)
    loss = sum(trainer.training_step(trainer.model, part, count).item() for part in samples)
    return loss, {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("variant", "class_name"), CASES)
def test_micro_batches_add_up_to_the_batch(variant, class_name, tmp_path):
    off = {name: 0.0 for name in vars(config_of(variant)) if "dropout" in name}
    config = config_of(variant, num_labels=CLASSES, **off)
    batch = batch_for(class_name)
    at_once, gradients = step(trainer_of(class_name, config, tmp_path, ROWS), batch)
    assert gradients and at_once > 0.1
    in_parts, of_parts = step(trainer_of(class_name, config, tmp_path, 1), batch)
    assert in_parts == pytest.approx(at_once, rel=1e-6)  # transformers' language model losses are float32
    assert gradients.keys() == of_parts.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(of_parts[name], gradient, rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("labels", "classes", "kind"),
    [
        (torch.tensor([0.5, -1.0, 2.0, 0.0]), 1, "regression"),
        (torch.tensor([1, 2, 3, 4]), 1, "regression"),
        (torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]]), 3, "multi_label_classification"),
        (torch.tensor([[0.5, 0, 1], [0, 3, 0], [0, 1, 0], [1, 1, 1]]), 3, "regression"),
    ],
)
def test_values_and_several_labels_add_up_too(labels, classes, kind, tmp_path):
    fields = {"num_labels": classes, "problem_type": kind if kind == "regression" and classes > 1 else None}
    batch = {"input_ids": ids_of(ROWS, LENGTH), "labels": labels}
    losses = []
    for size in (ROWS, 1):
        trainer = trainer_of("LonghornForSequenceClassification", config_of("longhorn", **fields), tmp_path, size)
        losses.append(step(trainer, batch)[0])
        assert trainer.model.config.problem_type == kind
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    with torch.no_grad():
        logits = trainer.model(batch["input_ids"]).logits
    compare = {"regression": torch.nn.MSELoss(), "multi_label_classification": torch.nn.BCEWithLogitsLoss()}[kind]
    assert losses[0] == pytest.approx(compare(logits, labels.double().view(logits.shape)).item(), rel=1e-9)


def test_a_count_is_what_the_sum_is_divided_by():
    """Given as a number, as loops of one's own do; and narrow logits do not narrow the loss."""
    logits, labels = torch.randn(5, 3, dtype=torch.bfloat16), torch.tensor([0, 1, -100, 2, 1])
    mean = torch.nn.functional.cross_entropy(logits.float(), labels)
    torch.testing.assert_close(cross_entropy(logits, labels), mean)
    torch.testing.assert_close(cross_entropy(logits, labels, 8), mean * 4 / 8)
    config = config_of("longhorn", num_labels=3)
    torch.testing.assert_close(sequence_classification_loss(labels, logits, config, torch.tensor(8)), mean * 4 / 8)
