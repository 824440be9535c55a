"""TRL's SFTTrainer with HiFT and TokenTune: two lines are new, and the script stays TRL's.

    python examples/trl_sft.py
    accelerate launch examples/trl_sft.py

A byte-level Llama learns to continue the headings of the Python language reference that ships inside Python; nothing is
downloaded. The loss is that of the completions, and 30 % of the tokens carry gradient.
"""

import argparse
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

import slivertune as st  # slivertune, line 1 of 2
from slivertune.training.embedded.base_model import make_byte_tokenizer


def read_rows(length):
    """Heading and beginning of each chapter, as a prompt and its completion."""
    chapters = [text.strip().split("\n", 1) for text in topics.values() if "\n" in text.strip()]
    return [{"prompt": heading, "completion": text[: length - len(heading)]} for heading, text in chapters]


def main(arguments):
    """Train, and print the loss before and after."""
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
    rows = Dataset.from_list(read_rows(arguments.length)).train_test_split(0.1, seed=0)
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=SFTConfig(
            output_dir=arguments.output_dir,
            max_steps=arguments.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
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
    attached = st.attach(trainer, st.HiFTConfig(steps_per_group=2), st.TokenTune(ratio=0.3))  # slivertune, line 2 of 2
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(
            f"SFTTrainer: {attached.optimizer.updates} updates of {attached.optimizer.num_groups} groups in turn  "
            f"loss {before:.3f} before, {after:.3f} after  checkpoint in {arguments.output_dir}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="bytes of a sequence")
    parser.add_argument("--output_dir", default="trl_sft_run", help="folder of the checkpoints")
    main(parser.parse_args())
