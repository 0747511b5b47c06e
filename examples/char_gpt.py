"""Train a character-level GPT on a text, and keep the weights with the best validation loss."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from gpuworker import LoopWorker, Trainer

BLOCK, WIDTH, BATCH_SIZE, ACCUMULATE, WARMUP, EVERY = 64, 96, 32, 2, 20, 20


class GPT(nn.Module):
    def __init__(self, num_chars: int) -> None:
        super().__init__()
        self.chars, self.places = nn.Embedding(num_chars, WIDTH), nn.Embedding(BLOCK, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, 3, nn.LayerNorm(WIDTH), False)
        self.head = nn.Linear(WIDTH, num_chars)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.chars(codes) + self.places.weight[: codes.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(codes.shape[1], x.device)
        logits: Tensor = self.head(self.blocks(x, mask, is_causal=True))
        return logits


def loss_fn(model: nn.Module, windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor) -> float:
    model.eval()
    loss = loss_fn(model, windows).item()
    model.train()
    return loss


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.1)


def new_scheduler(optimizer: torch.optim.Optimizer, total: int) -> LambdaLR:
    def warmup_cosine(step: int) -> float:
        return min((step + 1) / WARMUP, (1 + math.cos(math.pi * step / total)) / 2)

    return LambdaLR(optimizer, warmup_cosine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="resumed, too")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    best = args.out / "best.pt"
    text = args.data.read_text(encoding="utf-8")
    codes = {char: code for code, char in enumerate(sorted(set(text)))}
    windows = torch.tensor([codes[char] for char in text]).unfold(0, BLOCK + 1, BLOCK)
    train_set, held_out = windows[: -len(windows) // 10], windows[-len(windows) // 10 :]
    loader = DataLoader(TensorDataset(train_set), BATCH_SIZE, shuffle=True, drop_last=True)
    torch.manual_seed(0)
    model = GPT(len(codes))

    def loop(worker: LoopWorker) -> None:
        model = worker.model
        for (batch,) in worker.batches():
            for part in batch.chunk(ACCUMULATE):
                worker.backward(loss_fn(model, part) / ACCUMULATE)
            worker.step()
            step = worker.global_step + 1
            if worker.is_first and step % EVERY == 0:
                loss = evaluate(model, held_out[:128])
                print(f"step {step}  validation {loss:.4f}", flush=True)
                if not best.exists() or loss < torch.load(best)["loss"]:
                    torch.save({"loss": loss, "model": model.state_dict()}, best)

    builder = Trainer.loop(model, new_optimizer, loop).scheduler(new_scheduler).max_grad_norm(1.0)
    builder.dataset(loader).global_batch_size(BATCH_SIZE).num_epochs(args.epochs).seed(0)
    builder.checkpoint_dir(args.out).resume(args.out, missing_ok=True).devices(["cpu", "cpu"])
    builder.run().join()


if __name__ == "__main__":
    main()
