"""The Trainer of transformers with HiFT and TokenTune: three lines are new, and the Trainer stays as it is.

    python examples/trainer_hift.py
    torchrun --nproc_per_node 2 examples/trainer_hift.py
    accelerate launch examples/trainer_hift.py

A byte-level Llama learns the Python language reference that ships inside Python; nothing is downloaded. On several
ranks the updates are those of one process on the whole batch. Subclasses of the Trainer, such as TRL's, take the same.
"""

import argparse
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import slivertune as st  # HiFT, line 1 of 3


def read_rows(length):
    """Read the language reference as bytes, in rows of `length`."""
    text = "\n".join(topics.values()).encode()
    tokens = torch.tensor(list(text[: len(text) // length * length])).view(-1, length)
    return [{"input_ids": row, "labels": row} for row in tokens]


def main(arguments):
    """Train, and print the loss before and after."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=arguments.hidden,
        intermediate_size=2 * arguments.hidden,
        num_hidden_layers=arguments.blocks,
        num_attention_heads=4,
        max_position_embeddings=arguments.length,
    )
    torch.manual_seed(0)
    rows = read_rows(arguments.length)
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output_dir=arguments.output_dir,
            max_steps=arguments.steps,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            save_steps=arguments.steps,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=rows[64:],
        eval_dataset=rows[:64],
    )
    settings = [st.HiFTConfig(steps_per_group=2), st.TokenTune(ratio=0.5)]  # HiFT, line 2 of 3
    attached = st.attach(trainer, *settings)  # HiFT, line 3 of 3
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(
            f"{attached.optimizer.updates} updates of {attached.optimizer.num_groups} groups in turn on "
            f"{trainer.args.world_size} rank(s)  loss {before:.3f} before, {after:.3f} after  "
            f"checkpoint {arguments.output_dir}/checkpoint-{arguments.steps}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="bytes of a sequence")
    parser.add_argument("--output_dir", default="trainer_hift_run", help="folder of the checkpoints")
    main(parser.parse_args())
