"""HiFT through the Trainer's own argument `optimizer_cls_and_kwargs`, on one device; three lines are new.

    python examples/trainer_optimizer_class.py

For programs that make the Trainer themselves and pass this argument on; elsewhere `slivertune.attach` does more
(`trainer_hift.py`). Learning rate and weight decay are the optimizer's, not those of `TrainingArguments`. A byte-level
Llama learns the Python language reference that ships inside Python; nothing is downloaded. The run is trained to its
end, then from its first checkpoint again, which gives the same weights.
"""

import argparse
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import slivertune as st  # HiFT, line 1 of 3


def hift_factory():
    """Return the callable to which the Trainer passes its model and the keyword arguments."""
    return st.HiFT  # HiFT, line 2 of 3


def read_rows(length):
    """Read the language reference as bytes, in rows of `length`."""
    text = "\n".join(topics.values()).encode()
    tokens = torch.tensor(list(text[: len(text) // length * length])).view(-1, length)
    return [{"input_ids": row, "labels": row} for row in tokens]


def make_trainer(arguments, rows):
    """Make a Trainer over a new model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=arguments.hidden,
        intermediate_size=2 * arguments.hidden,
        num_hidden_layers=arguments.blocks,
        num_attention_heads=4,
        max_position_embeddings=arguments.length,
    )
    settings = {"optimizer_class": torch.optim.AdamW, "config": st.HiFTConfig(steps_per_group=2), "lr": 3e-3}
    return Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output_dir=arguments.output_dir,
            max_steps=arguments.steps,
            per_device_train_batch_size=8,
            lr_scheduler_type="cosine",
            save_steps=arguments.steps // 2,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=rows[64:],
        eval_dataset=rows[:64],
        optimizer_cls_and_kwargs=(hift_factory, settings),  # HiFT, line 3 of 3
    )


def main(arguments):
    """Train, resume, and print the loss before and after."""
    rows = read_rows(arguments.length)
    trainer = make_trainer(arguments, rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    again = make_trainer(arguments, rows)
    again.train(resume_from_checkpoint=f"{arguments.output_dir}/checkpoint-{arguments.steps // 2}")
    pairs = zip(trainer.model.state_dict().values(), again.model.state_dict().values(), strict=True)
    same = "the same" if all(torch.equal(one, other) for one, other in pairs) else "other"
    optimizer = trainer.optimizer.optimizer  # inside the wrapper of accelerate
    print(
        f"{optimizer.updates} updates of {optimizer.num_groups} groups in turn  "
        f"loss {before:.3f} before, {after:.3f} after  resumed half way: {same} weights"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="bytes of a sequence")
    parser.add_argument("--output_dir", default="trainer_optimizer_class_run", help="folder of the checkpoints")
    main(parser.parse_args())
