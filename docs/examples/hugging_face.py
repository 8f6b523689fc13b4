"""A Hugging Face classifier, decomposed to half of its parameters and fine-tuned under a memory budget."""

import argparse

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from ctdr_lightning import CTDRCallback


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        # With weights of the Hub: BertForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=4)
        config = BertConfig(
            vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
            max_position_embeddings=64, num_labels=4,
        )  # fmt: skip
        self.model = BertForSequenceClassification(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        right = self.model(**batch).logits.argmax(1) == batch["labels"]
        self.log("val/acc", right.float().mean(), batch_size=len(right), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def sentences(n: int, length: int = 48) -> list[dict[str, Tensor]]:
    """A tokenizer's output for random words; each label has 16 words of its own, which are more frequent."""
    labels, words = torch.randint(4, (n,)), torch.randint(64, (n, length))
    own = 16 * labels[:, None] + words % 16
    words = torch.where(torch.rand(n, length) < 0.4, own, words)
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": label}
        for row, label in zip(words, labels, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--memory-budget", default="10MiB")
    args = parser.parse_args()

    seed_everything(0)
    train, held_out = DataLoader(sentences(512), 16, shuffle=True), DataLoader(sentences(128), 16)
    classifier = Classifier()
    Trainer(max_epochs=3).fit(classifier, train, held_out)  # takes the place of pretraining
    ctdr = CTDRCallback(
        memory_budget=args.memory_budget,
        rank=0.5,
        recovery={"monitor": "val/acc", "mode": "max", "reference": "measure"},
    )
    trainer = Trainer(max_epochs=args.epochs, callbacks=[ctdr], log_every_n_steps=10)
    trainer.fit(classifier, train, held_out)


if __name__ == "__main__":
    main()
