"""TRL's DPOTrainer with HiFT: two lines are new, and the script stays TRL's.

    python examples/trl_dpo.py
    accelerate launch examples/trl_dpo.py

A byte-level Llama learns to prefer the beginning of a chapter of the Python language reference, which ships inside
Python, to the same text backwards; nothing is downloaded. All of its parameters are trained, a group of layers at a
time; the reference is a copy of it.
"""

import argparse
import copy
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer

import slivertune as st  # slivertune, line 1 of 2
from slivertune.training.embedded.base_model import make_byte_tokenizer


def read_rows(length):
    """Heading of each chapter, its beginning, and that backwards."""
    chapters = [text.strip().split("\n", 1) for text in topics.values() if "\n" in text.strip()]
    starts = [(heading, text.strip()[: length - len(heading) - 1]) for heading, text in chapters]
    return [{"prompt": heading, "chosen": start, "rejected": start[::-1]} for heading, start in starts if start]


def main(arguments):
    """Train, and print how often the chosen text is preferred."""
    tokenizer = make_byte_tokenizer(None)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=arguments.hidden,
        intermediate_size=2 * arguments.hidden,
        num_hidden_layers=arguments.blocks,
        num_attention_heads=4,
        max_position_embeddings=arguments.length,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    rows = Dataset.from_list(read_rows(arguments.length)).train_test_split(0.1, seed=0)
    trainer = DPOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),
        args=DPOConfig(
            output_dir=arguments.output_dir,
            max_steps=arguments.steps,
            per_device_train_batch_size=4,
            learning_rate=5e-5,
            lr_scheduler_type="cosine",
            max_length=arguments.length,
            save_steps=arguments.steps,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        processing_class=tokenizer,
    )
    attached = st.attach(trainer, st.HiFTConfig(steps_per_group=2))  # slivertune, line 2 of 2
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(
            f"DPOTrainer: {attached.optimizer.updates} updates of {attached.optimizer.num_groups} groups in turn  "
            f"loss {before['eval_loss']:.3f} before, {after['eval_loss']:.3f} after  "
            f"chosen text preferred in {after['eval_rewards/accuracies']:.0%}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="bytes of a sequence")
    parser.add_argument("--output_dir", default="trl_dpo_run", help="folder of the checkpoints")
    main(parser.parse_args())
