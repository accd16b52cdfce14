"""Batch-norm statistics over training inputs, by either trainer, against sums over those inputs."""

import copy

import datasets
import numpy as np
import pytest
import torch
from conftest import collate, make_dataset, make_model
from lab.batch_norm import batch_norm_inputs, recomputed_batch_norm
from lab.map import MAPConfig, MAPTrainer

from hf_deelbo import DEELBoConfig, DEELBoTrainer

BOTH = pytest.mark.parametrize(("config", "trainer_class"), [(MAPConfig, MAPTrainer), (DEELBoConfig, DEELBoTrainer)])


def make_trainer(config, trainer_class, folder, data, **kwargs):
    places = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    args = config.paper(str(folder), **places, per_device_eval_batch_size=8, **kwargs)
    return trainer_class(make_model("resnet"), args, train_dataset=data, data_collator=collate)


@BOTH
@pytest.mark.parametrize(("most", "sizes"), [(2048, [7, 7, 7]), (17, [6, 6, 5]), (9, [5, 4])])
def test_equal_batches_without_labels_of_balanced_classes(config, trainer_class, tmp_path, most, sizes):
    data = make_dataset("resnet", 21)
    order = [*range(0, 21, 3), *range(1, 21, 3), *range(2, 21, 3)]  # class by class
    names = {"pixel_values": [data[i]["pixel_values"].numpy() for i in order], "other": [0] * 21}
    labels = [data[i]["labels"] for i in order]
    rows = datasets.Dataset.from_dict(names | {"labels": labels}).with_format("torch")
    trainer = make_trainer(config, trainer_class, tmp_path, rows, num_batch_norm_examples=most)
    batches = list(batch_norm_inputs(trainer, rows))
    assert [set(batch) for batch in batches] == [{"pixel_values"}] * len(sizes)
    assert [len(batch["pixel_values"]) for batch in batches] == sizes
    taken = torch.cat([batch["pixel_values"] for batch in batches])
    found = [int(np.flatnonzero([torch.equal(image, row) for row in rows["pixel_values"][:]])[0]) for image in taken]
    assert found == sorted(set(found))
    counts = np.bincount([labels[i] for i in found])
    assert counts.max() - counts.min() <= 1
    again = torch.cat([batch["pixel_values"] for batch in batch_norm_inputs(trainer, rows)])
    assert torch.equal(again, taken)


@BOTH
def test_statistics_of_what_the_first_layer_receives(config, trainer_class, tmp_path, snapshot, assert_same):
    data, others = make_dataset("resnet", 21), make_dataset("resnet", 21, seed=8)
    trainer = make_trainer(config, trainer_class, tmp_path, data)
    model, before = trainer.model, snapshot(trainer.model)
    embedder = model.resnet.embedder.embedder
    with torch.no_grad():
        received = copy.deepcopy(embedder.convolution)(collate(others)["pixel_values"]).double()
    with recomputed_batch_norm(trainer, others):
        layer = embedder.normalization
        torch.testing.assert_close(layer.running_mean.double(), received.mean((0, 2, 3)), rtol=1e-5, atol=1e-6)
        variance = received.var((0, 2, 3), correction=0)
        torch.testing.assert_close(layer.running_var.double(), variance, rtol=1e-5, atol=1e-6)
    assert_same(before, snapshot(model))
