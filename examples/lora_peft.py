"""Adapt a classifier of Transformers with PEFT's LoRA, in a loop of one's own."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification, BertConfig
from transformers import BertForSequenceClassification as Bert

from gpuworker import Trainer

LENGTH, NUM_CLASSES = 16, 4


def load(name: str | None, vocabulary: int) -> Any:
    """A classifier: one from a directory or the hub, or a tiny new one."""
    if name is not None:
        return AutoModelForSequenceClassification.from_pretrained(name, num_labels=NUM_CLASSES)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    layers = {"num_hidden_layers": 2, "max_position_embeddings": LENGTH}
    return Bert(BertConfig(vocab_size=vocabulary, num_labels=NUM_CLASSES, **sizes, **layers))


def sentences(count: int, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows of tokens; a row's class is which of the first four tokens it holds most often."""
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    tokens = torch.randint(NUM_CLASSES, vocabulary, (count, LENGTH), generator=generator)
    marked = torch.rand(count, LENGTH, generator=generator) < 0.3
    return torch.where(marked, labels[:, None], tokens), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="directory or name on the hub; default: tiny and new")
    parser.add_argument("--workers", type=int, default=2, help="replicas, all on the CPU")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
    parser.add_argument("--rank", type=int, default=4, help="of the adapters")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--out", type=Path, help="directory for the adapters")
    args = parser.parse_args()
    torch.manual_seed(0)
    random, vocabulary = torch.Generator().manual_seed(0), 50
    config = LoraConfig(task_type="SEQ_CLS", r=args.rank, target_modules=["query", "value"])
    adapted = get_peft_model(load(args.model, vocabulary), config)
    travels = sum(p.nbytes for p in adapted.parameters() if p.requires_grad)
    whole = sum(p.nbytes for p in adapted.parameters())
    print(f"adapters and head: {travels:,} of {whole:,} bytes, {travels / whole:.1%}")

    devices = ["cpu"] * args.workers
    with Trainer.setup(adapted, lambda p: torch.optim.AdamW(p, args.lr), devices) as model:
        for step in range(1, args.steps + 1):
            tokens, labels = sentences(args.batch_size, vocabulary, random)
            loss = model(input_ids=tokens, labels=labels).loss
            loss.backward()
            model.step()
            if step % max(1, args.steps // 4) == 0:
                print(f"step {step:4}  loss {loss.item():.3f}", flush=True)
        model.eval()
        tokens, labels = sentences(256, vocabulary, random)
        with torch.no_grad():
            reached = (model(input_ids=tokens).logits.argmax(1) == labels).float().mean()
    print(f"accuracy {reached:.1%}")
    if args.out is not None:
        adapted.save_pretrained(args.out)


if __name__ == "__main__":
    main()
