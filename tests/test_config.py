import json
import math
from dataclasses import fields

import pytest
import yaml
from transformers import HfArgumentParser, TrainingArguments

from hf_deelbo import DEELBoConfig


def parse(*arguments: str) -> DEELBoConfig:
    return HfArgumentParser(DEELBoConfig).parse_args_into_dataclasses(["--use_cpu", *arguments])[0]


def test_what_trainer_has_too_keeps_its_defaults(tmp_path):
    """Whoever changes two class names keeps optimiser, learning rate, schedule and batches."""
    own = {field.name for field in fields(DEELBoConfig)} - {field.name for field in fields(TrainingArguments)}
    ours, theirs = (kind(str(tmp_path), use_cpu=True).to_dict() for kind in (DEELBoConfig, TrainingArguments))
    assert {name: value for name, value in ours.items() if name not in own} == theirs
    assert (ours["prior"], ours["kappa"], ours["sigma_update"]) == ("l2-sp", "auto", "closed-form")
    assert (ours["num_eval_samples"], ours["num_elbo_samples"], ours["head_names"]) == (0, 10, None)


def test_the_paper(tmp_path):
    config = DEELBoConfig.paper(str(tmp_path), use_cpu=True)
    assert (config.prior, config.kappa, config.init_sigma) == ("l2-sp", "auto", 1e-4)
    assert (config.sigma_update, config.grouping) == ("optimizer", "all")
    assert (config.optim, config.optim_args) == ("sgd", "momentum=0.9,nesterov=True")
    assert (config.lr_scheduler_type, config.max_grad_norm, config.weight_decay) == ("cosine", 1.0, 0.0)
    assert (config.per_device_train_batch_size, config.dataloader_drop_last) == (128, True)
    changed = DEELBoConfig.paper(str(tmp_path), use_cpu=True, optim="adamw_torch", init_sigma=1e-2)
    assert (changed.optim, changed.optim_args, changed.init_sigma) == ("adamw_torch", None, 1e-2)
    ours = DEELBoConfig.paper(str(tmp_path), use_cpu=True, sigma_update="closed-form")
    assert (ours.optim, ours.grouping, ours.kl_warmup_epochs) == ("sgd", "tensor", 5.0)


def test_weight_decay_is_ignored_with_one_warning(tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr("hf_deelbo.config.logger.warning", messages.append)
    config = DEELBoConfig(str(tmp_path), use_cpu=True, weight_decay=0.01)
    assert config.weight_decay == 0
    assert messages == [
        "weight_decay=0.01 is ignored: delete it. The KL to the prior is the decay, and its strength is learned."
    ]


def test_command_line():
    config = parse("--prior", "l2-zero", "--kappa", "2.5", "--head_names", "a", "b", "--no_recompute_batch_norm")
    assert (config.prior, config.kappa, config.head_names) == ("l2-zero", 2.5, ["a", "b"])
    assert config.recompute_batch_norm is False
    assert parse("--kappa", "auto").kappa == "auto"


@pytest.mark.parametrize("suffix", ["json", "yaml"])
@pytest.mark.parametrize("kappa", ["auto", 1])
def test_files(tmp_path, suffix, kappa):
    settings = {"output_dir": str(tmp_path), "kappa": kappa, "init_sigma": 0.01, "head_names": ["fc"], "use_cpu": True}
    path = tmp_path / f"config.{suffix}"
    path.write_text((json.dumps if suffix == "json" else yaml.safe_dump)(settings))
    parser = HfArgumentParser(DEELBoConfig)
    (config,) = (parser.parse_json_file if suffix == "json" else parser.parse_yaml_file)(path)
    assert (config.kappa, config.init_sigma, config.head_names) == (kappa, 0.01, ["fc"])


def test_it_survives_its_own_json(tmp_path):
    config = DEELBoConfig(str(tmp_path), kappa=3, init_sigma=1e-3, learning_rate=0.1, use_cpu=True)
    path = tmp_path / "config.json"
    path.write_text(config.to_json_string())
    (again,) = HfArgumentParser(DEELBoConfig).parse_json_file(path, allow_extra_keys=True)
    assert again.to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("kappa", 0, 'kappa: must be a positive number or "auto"'),
        ("kappa", -1.0, "kappa: .*-1.0"),
        ("kappa", math.nan, "kappa: .*nan"),
        ("kappa", math.inf, "kappa: .*inf"),
        ("kappa", "many", "kappa: .*'many'"),
        ("init_sigma", 0, "init_sigma: must be a positive number, got 0"),
        ("init_sigma", -1e-4, "init_sigma"),
        ("init_sigma", math.nan, "init_sigma"),
        ("prior", "l3", "unknown prior 'l3'; choose one of l2-zero, l2-sp, ptyl"),
        ("num_eval_samples", -1, "num_eval_samples: .*-1"),
        ("num_elbo_samples", 0, "num_elbo_samples: .* at least 1, got 0"),
        ("num_train_examples", 0, "num_train_examples: .* got 0"),
        ("num_batch_norm_examples", 1, "num_batch_norm_examples: .* got 1"),
        ("sigma_update", "newton", "sigma_update: unknown value 'newton'; choose one of closed-form, optimizer"),
        ("grouping", "neuron", "grouping: unknown value 'neuron'; choose one of all, part, layer, tensor"),
        ("label_smoothing_factor", 0.1, "label_smoothing_factor: must be 0"),
        ("bf16_full_eval", True, "bf16_full_eval: 16-bit weights"),
        ("optim", "adalomo", "inside the backward pass"),
        ("fsdp", "full_shard", "fsdp: is not supported.*DistributedConfig"),
        ("deepspeed", "zero3.json", "deepspeed: is not supported.*DDP"),
    ],
)
def test_bad_values_are_refused_by_name(tmp_path, name, value, message):
    with pytest.raises(ValueError, match=message):
        DEELBoConfig(str(tmp_path), use_cpu=True, **{name: value})


def test_where_a_saved_prior_comes_from():
    assert DEELBoConfig("outputs", prior="ptyl", prior_name_or_path="a/b", prior_revision="v1").prior_revision == "v1"
    with pytest.raises(ValueError, match="prior_name_or_path: 'a/b' was given, but prior='l2-sp'"):
        DEELBoConfig("outputs", prior_name_or_path="a/b")
    with pytest.raises(ValueError, match='prior="posterior" needs the posterior'):
        DEELBoConfig("outputs", prior="posterior")
