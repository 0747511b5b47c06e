"""Fine-tune a causal language model of Transformers on a text: a tiny new one, or any other."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers import get_linear_schedule_with_warmup as linear_schedule

from gpuworker import Trainer

SENTENCE = "the quick brown fox jumps over the lazy dog; "


class Bytes:
    """Texts as their bytes, for the tiny model, which has no tokenizer."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Tensor) -> str:
        return bytes(int(t) for t in tokens if t < 256).decode(errors="replace")


def load(name: str | None) -> tuple[Any, Any]:
    """A model and its tokenizer, from a directory or the hub, or new and tiny."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    special = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    config = GPT2Config(vocab_size=257, n_positions=128, n_embd=64, n_layer=2, n_head=2, **special)
    return GPT2LMHeadModel(config), Bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="directory or name on the hub; default: tiny and new")
    parser.add_argument("--data", type=Path, help="a text; default: a sentence, repeated")
    parser.add_argument("--workers", type=int, default=2, help="replicas, all on the CPU")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16, help="of a step")
    parser.add_argument("--length", type=int, default=32, help="tokens in a sample")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--out", type=Path, help="directory for the trained model")
    args = parser.parse_args()
    torch.manual_seed(0)
    model, tokenizer = load(args.model)
    text = SENTENCE * 100 if args.data is None else args.data.read_text(encoding="utf-8")
    tokens = torch.tensor(tokenizer.encode(text))
    samples = tokens[: len(tokens) // args.length * args.length].view(-1, args.length)
    if not len(samples):
        parser.error(f"--data: the text has fewer than {args.length} tokens")

    handle = (
        Trainer.builder(
            model,
            lambda params: torch.optim.AdamW(params, args.lr),
            lambda replica, batch: replica(**batch),  # computes its loss, a mean over tokens
        )
        .dataset({"input_ids": samples, "labels": samples})
        .global_batch_size(args.batch_size)
        .num_epochs(args.epochs)
        .devices(["cpu"] * args.workers)
        .max_grad_norm(1.0)
        .scheduler(lambda optimizer, total: linear_schedule(optimizer, total // 10, total))
        .run()
    )
    for m in handle.metrics():
        print(f"epoch {m.epoch}  loss {m.avg_loss:.3f}  {m.num_samples / m.epoch_s:.0f} samples/s")
    model.load_state_dict(handle.join().state_dict())
    model.eval()
    written = model.generate(
        samples[:1, :8], attention_mask=torch.ones(1, 8), max_new_tokens=40, do_sample=False
    )
    print(tokenizer.decode(written[0]))
    if args.out is not None:
        model.save_pretrained(args.out)


if __name__ == "__main__":
    main()
