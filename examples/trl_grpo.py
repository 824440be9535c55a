"""TRL's GRPOTrainer with HiFT: two lines are new, and the script stays TRL's.

    python examples/trl_grpo.py
    accelerate launch examples/trl_grpo.py

A byte-level Llama learns to write lower-case letters, which a function rewards; nothing is downloaded. All of its
parameters are trained, a group of layers at a time.
"""

import argparse
import string

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

import slivertune as st  # slivertune, line 1 of 2
from slivertune.training.embedded.base_model import make_byte_tokenizer


def reward_letters(completions, **kwargs):
    """Share of the characters that are lower-case letters."""
    return [sum(each in string.ascii_lowercase for each in text) / max(1, len(text)) for text in completions]


def main(arguments):
    """Train, and print the reward at first and in the end."""
    tokenizer = make_byte_tokenizer(None)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=arguments.hidden,
        intermediate_size=2 * arguments.hidden,
        num_hidden_layers=arguments.blocks,
        num_attention_heads=4,
        max_position_embeddings=2 * arguments.length,
    )
    torch.manual_seed(0)
    trainer = GRPOTrainer(
        model=LlamaForCausalLM(config),
        reward_funcs=reward_letters,
        args=GRPOConfig(
            output_dir=arguments.output_dir,
            max_steps=arguments.steps,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=arguments.length,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            logging_steps=max(1, arguments.steps // 5),
            save_steps=arguments.steps,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{letter}: "} for letter in string.ascii_letters]),
        processing_class=tokenizer,
    )
    attached = st.attach(trainer, st.HiFTConfig(steps_per_group=2))  # slivertune, line 2 of 2
    trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    if trainer.is_world_process_zero():
        print(
            f"GRPOTrainer: {attached.optimizer.updates} updates of {attached.optimizer.num_groups} groups in turn  "
            f"reward {rewards[0]:.3f} at first, {rewards[-1]:.3f} in the end"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--length", type=int, default=12, help="bytes of a completion")
    parser.add_argument("--output_dir", default="trl_grpo_run", help="folder of the checkpoints")
    main(parser.parse_args())
