"""LoRA with a posterior over the adapters: train, test, save, load again, predict. Needs `pip install peft`.

    python examples/run_lora.py --dataset_name rotten_tomatoes --train_size 200

The dataset, a folder or an id on the Hub, has a column of texts and one of labels; the model is any BERT or one whose
attention layers `--target_modules` names. The posterior is over the adapters and the head: what is saved is small, and
loads the base model from where it came from. `--help` lists the options.
"""

import argparse
from collections.abc import Sequence

from lab.backbones import load_classifier
from lab.data import as_tokens, load_data
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, DataCollatorWithPadding, set_seed

from hf_deelbo import DEELBoConfig, DEELBoTrainer, GaussianPosterior
from hf_deelbo.metrics import compute_metrics, named_metrics

NUM_SAMPLES = 10


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_name", required=True, help="an id on the Hub or a folder")
    parser.add_argument("--train_size", type=int, help="of a class-balanced subset to train on; default is all")
    parser.add_argument("--max_eval_samples", type=int, default=1000, help="at most so many test rows")
    parser.add_argument("--model_name_or_path", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--target_modules", nargs="+", default=["query", "value"], help="which get adapters")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--num_train_epochs", type=float, default=20, help="adapters start at zero, and take more")
    parser.add_argument("--max_seq_length", type=int, default=128)
    parser.add_argument("--output_dir", default="outputs/run_lora")
    parser.add_argument("--sentence", default="A quiet film that stays with you.", help="to be classified at the end")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> GaussianPosterior:
    """Run; returns the posterior that was loaded again."""
    options = parse(argv)
    data = load_data(options.dataset_name, train_size=options.train_size)
    tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path)
    train, test = (
        as_tokens(rows, data.inputs, data.label, tokenizer, options.max_seq_length) for rows in (data.train, data.test)
    )

    args = DEELBoConfig(
        options.output_dir,
        learning_rate=options.learning_rate,  # adapters start at zero: 10 to 100 times that of fine-tuning all weights
        warmup_steps=0.1,  # of all steps; then linear decay
        num_train_epochs=options.num_train_epochs,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        remove_unused_columns=False,  # texts are tokenized when they are read
        save_strategy="no",
        report_to="none",
    )
    set_seed(args.seed)  # of the new head, and of the adapters
    model = load_classifier(options.model_name_or_path, data.class_names, kind="text")
    # a task_type lets peft train the head whole
    lora = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=options.target_modules)
    trainer = DEELBoTrainer(
        get_peft_model(model, lora),
        args,
        train_dataset=train,
        eval_dataset=test.select(range(min(options.max_eval_samples, len(test)))),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    print(trainer.posterior)
    for where, num_samples in (("posterior mean", 0), (f"average of {NUM_SAMPLES} samples", NUM_SAMPLES)):
        trainer.args.num_eval_samples = num_samples
        metrics = named_metrics(trainer.predict(trainer.eval_dataset).metrics, "test")
        print(f"{where:22}", "  ".join(f"{name} {value:.3f}" for name, value in metrics.items()))

    trainer.save_model()  # or trainer.push_to_hub(), with a card
    posterior = GaussianPosterior.from_pretrained(options.output_dir)
    inputs = tokenizer(options.sentence, return_tensors="pt")
    probabilities = posterior.predict_proba(inputs, NUM_SAMPLES)[0]
    answer = probabilities.argmax().item()
    print(f"{options.sentence!r}: {posterior.model.config.id2label[answer]} ({probabilities[answer]:.2f})")
    return posterior


if __name__ == "__main__":
    main()
