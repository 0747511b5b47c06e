"""Train a small transformer on the characters of a text, and generate some."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpuworker import Trainer

BLOCK, BATCH_SIZE = 64, 32
WIDTH, NUM_HEADS, NUM_LAYERS = 96, 4, 3


class Windows:
    """A data set of windows of a text, side by side; targets are shifted by one character."""

    def __init__(self, codes: Tensor) -> None:
        self.windows = codes.unfold(0, BLOCK + 1, BLOCK)

    def __len__(self) -> int:
        return len(self.windows)

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.windows[indices, :-1], self.windows[indices, 1:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class CharLM(nn.Module):
    def __init__(self, num_chars: int) -> None:
        super().__init__()
        self.chars, self.places = nn.Embedding(num_chars, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, num_chars)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.chars(codes) + self.places.weight[: codes.shape[1]]
        logits: Tensor = self.head(self.blocks(x))
        return logits


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="FILE")
    parser.add_argument("--workers", type=int, default=2, help="all on the CPU")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    try:
        text = args.data.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--data: {error}")
    if len(text) < 20 * BLOCK:
        parser.error(f"--data: {args.data} holds fewer than {20 * BLOCK} characters")
    alphabet, inverse = np.unique(list(text), return_inverse=True)
    codes = torch.from_numpy(inverse)
    train, held_out = Windows(codes[: -len(codes) // 10]), Windows(codes[-len(codes) // 10 :])
    validation = held_out.get_batch(torch.arange(len(held_out))[:128])
    builder = Trainer.builder(
        lambda device: CharLM(len(alphabet)).to(device),
        lambda params: torch.optim.AdamW(params, lr=2e-3),
        loss_fn,
    ).eval_fn(lambda model, epoch: {"loss": loss_fn(model, validation).item()})
    builder.dataset(train).global_batch_size(BATCH_SIZE).num_epochs(args.epochs).seed(0)
    handle = builder.devices(["cpu"] * args.workers).max_grad_norm(1.0).run()
    for m in handle.metrics():
        print(f"epoch {m.epoch}  loss {m.avg_loss:.4f}", end="  ")
        print(f"validation {m.scalars['eval/loss']:.4f}  {m.epoch_s:.1f} s", flush=True)
    model = handle.join().model()
    written = codes[:1]
    for _ in range(300):
        odds = model(written[None, -BLOCK:])[0, -1].softmax(-1)
        written = torch.cat([written, torch.multinomial(odds, 1)])
    print("".join(alphabet[written]))


if __name__ == "__main__":
    main()
