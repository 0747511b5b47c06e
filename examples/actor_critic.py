"""Train an actor and a critic to balance poles on carts; each worker simulates its own."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpuworker import LoopWorker, Trainer

NUM_CARTS, ROLLOUT, LIMIT = 32, 32, 500
DISCOUNT, ENTROPY = 0.98, 0.01


class Carts:
    """Poles on carts, pushed to the left or right (Barto, Sutton and Anderson, 1983)."""

    def __init__(self, count: int) -> None:
        self.states = 0.1 * torch.rand(count, 4) - 0.05  # position, speed, angle, its speed
        self.ages = torch.zeros(count)

    def push(self, actions: Tensor) -> Tensor:
        """Simulate 20 ms and restart carts whose episode has ended; returns a mask of them."""
        x, x_speed, angle, turn = self.states.unbind(1)
        lift = (20.0 * actions - 10.0 + 0.05 * turn**2 * angle.sin()) / 1.1
        pull = 9.8 * angle.sin() - angle.cos() * lift
        bend = pull / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        gain = lift - 0.05 * bend * angle.cos() / 1.1
        change = torch.stack([x_speed, gain, turn, bend], dim=1)
        self.states = self.states + 0.02 * change
        self.ages += 1
        x, angle = self.states[:, 0], self.states[:, 2]
        ended = (x.abs() > 2.4) | (angle.abs() > 0.21) | (self.ages >= LIMIT)
        fresh = 0.1 * torch.rand_like(self.states) - 0.05
        self.states = torch.where(ended[:, None], fresh, self.states)
        self.ages[ended] = 0
        return ended


def mlp(num_out: int, width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, num_out))


@torch.no_grad()
def play(actor: nn.Module, carts: Carts, num_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """States (one more than steps), actions and ends of episodes, each with a row for each step."""
    states, actions, ends = [carts.states], [], []
    for _ in range(num_steps):
        actions.append(torch.multinomial(actor(states[-1]).softmax(1), 1).squeeze(1))
        ends.append(carts.push(actions[-1]))
        states.append(carts.states)
    return torch.stack(states), torch.stack(actions), torch.stack(ends).float()


def loop(worker: LoopWorker) -> None:
    actor, critic = worker.model.get_submodule("actor"), worker.model.get_submodule("critic")
    carts = Carts(NUM_CARTS)
    for _ in worker.steps():
        states, actions, ends = play(actor, carts, ROLLOUT)
        values = critic(states).squeeze(2)
        returns = [values[-1].detach()]
        for end in reversed(ends):
            returns.append(1.0 + DISCOUNT * (1.0 - end) * returns[-1])
        target = torch.stack(returns[:0:-1])
        worker.step(F.smooth_l1_loss(values[:-1], target), optimizer="critic")
        odds = actor(states[:-1]).log_softmax(2)
        chosen = odds.gather(2, actions[..., None]).squeeze(2)
        gain = (chosen * (target - values[:-1].detach())).mean()
        entropy = -(odds.exp() * odds).sum(2).mean()
        worker.step(-gain - ENTROPY * entropy, optimizer="actor")
        worker.log(ends=ends.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="all on the CPU")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50, help="of each worker in an epoch")
    args = parser.parse_args()
    model = nn.ModuleDict({"actor": mlp(2), "critic": mlp(1)})
    builder = Trainer.loop(
        model, lambda m: {k: torch.optim.Adam(m[k].parameters(), 5e-3) for k in m}, loop
    )
    builder.steps_per_epoch(args.steps).num_epochs(args.epochs).devices(["cpu"] * args.workers)
    handle = builder.max_grad_norm(1.0).seed(0).run()
    for m in handle.metrics():
        print(f"epoch {m.epoch}  {1 / max(m.scalars['ends'], 1 / LIMIT):.0f} steps an episode")
    handle.join()
    ends = play(model["actor"], Carts(100), LIMIT)[2]
    print(f"balanced for {ends.cumsum(0).eq(0).sum(0).float().mean():.0f} of {LIMIT} steps")


if __name__ == "__main__":
    main()
