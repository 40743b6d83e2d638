"""Mixed precision with gradient accumulation, clipped by one line: `attach`.

Run it: python examples/torch_amp.py. It trains a small recurrent network to sum a sequence, twice, on the CPU. Its weights
begin so large that gradients explode: without clipping the run is lost, with `attach` it learns. Gradients are clipped once
for every optimizer step, on the sum over micro-batches, after the scaler has divided its scale out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import gradclip
from gradclip.integrations.torch import attach

STEPS, MICRO_BATCHES, LENGTH, WIDTH = 150, 4, 30, 32


class Summing(nn.Module):
    """Reads a sequence of numbers, says their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNN(1, WIDTH, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(WIDTH, 1)
        with torch.no_grad():
            self.cell.weight_hh_l0.copy_(1.1 * torch.eye(WIDTH))

    def forward(self, sequences: Tensor) -> Tensor:
        states, _ = self.cell(sequences)
        return self.head(states[:, -1])


def train(clip: bool) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    model = Summing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.004, momentum=0.9)
    if clip:
        attached = attach(optimizer, gradclip.MaxNorm(1.0), named_parameters=model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(MICRO_BATCHES):
            sequences = torch.rand(16, LENGTH, 1) - 0.5
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.mse_loss(model(sequences).float(), sequences.sum(1)) / MICRO_BATCHES
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.step(optimizer)
        scaler.update()
        losses.append(total)
        if clip and step % 30 == 0:
            print(f"step {step:3}: loss {total:8.3f}, {attached.last}")
    if clip:
        print(f"{attached.counts.clipped} of {attached.counts.steps} steps were clipped")
    return losses


if __name__ == "__main__":
    for clip in (False, True):
        losses = train(clip)
        print(f"{'clipped' if clip else 'not clipped'}: loss {losses[0]:.3g} → {sum(losses[-10:]) / 10:.3g}")
