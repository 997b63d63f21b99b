"""ESS-scaled learning rates in a PPO-style module that is almost independent of this package.

    python examples/foreign_ppo_ess.py

Actor and critic have an optimizer each and use manual optimization. Actions are sampled by a copy of the actor that is
several updates old. A single line serves the callback: it stores the log-ratios.
"""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lit_async_rl.callbacks import ESSLearningRate, GradientClipping

NUM_ACTIONS = 8
NUM_FEATURES = 6


def network(outputs: int) -> nn.Sequential:
    """Two-layer network."""
    return nn.Sequential(nn.Linear(NUM_FEATURES, 32), nn.Tanh(), nn.Linear(32, outputs))


class ActorCritic(pl.LightningModule):
    """Chooses one of eight actions; the correct one is a hidden linear function of the observation, with reward 1.

    Args:
        lag: updates after which the copy that acts is brought up to date.
    """

    def __init__(self, lag: int = 8) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.actor = network(NUM_ACTIONS)
        self.critic = network(1)
        self.behavior = copy.deepcopy(self.actor).requires_grad_(False)
        self.register_buffer(
            "secret", torch.randn(NUM_FEATURES, NUM_ACTIONS, generator=torch.Generator().manual_seed(1))
        )
        self.lag = lag

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Acts with the old copy, then updates critic and actor."""
        (states,) = batch
        behavior = torch.distributions.Categorical(logits=self.behavior(states))
        actions = behavior.sample()
        rewards = (actions == (states @ self.secret).argmax(-1)).float()
        values = self.critic(states).squeeze(-1)
        log_ratio = torch.distributions.Categorical(logits=self.actor(states)).log_prob(actions) - behavior.log_prob(
            actions
        )

        self.stabilizer_signals = {"log_ratio": log_ratio.detach(), "rewards": rewards}

        advantages = (rewards - values).detach()
        ratio = log_ratio.exp()
        actor_loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        actor_optimizer, critic_optimizer = self.optimizers()
        for optimizer, loss in ((critic_optimizer, F.mse_loss(values, rewards)), (actor_optimizer, actor_loss)):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        if (batch_idx + 1) % self.lag == 0:
            self.behavior.load_state_dict(self.actor.state_dict())
        self.log("reward", rewards.mean(), prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.AdamW(self.actor.parameters(), lr=0.01),
            torch.optim.Adam(self.critic.parameters(), lr=0.01),
        ]


def main(max_steps: int = 1000) -> dict[str, float]:
    """Trains and returns the last metrics."""
    pl.seed_everything(0, verbose=False)
    states = TensorDataset(torch.randn(128 * max_steps // 2, NUM_FEATURES))
    trainer = pl.Trainer(
        max_steps=max_steps,  # two optimizers: two steps for each batch
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        callbacks=[ESSLearningRate(optimizer="actor"), GradientClipping(0.5, optimizer="actor")],
    )
    trainer.fit(ActorCritic(), DataLoader(states, batch_size=128))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name:24} {value:.3f}")
