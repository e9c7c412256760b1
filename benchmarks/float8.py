"""Whether products in float8 change what a drafter learns: losses on a wide synthetic target, with and without.

    python benchmarks/float8.py --hidden 4096 --steps 200 --seeds 0 1 2

The target is made up: a token follows from the two before it, by a random network whose states are the target's. Its
text is sampled from it, so a drafter can learn it, up to the noise of sampling. Each seed draws the drafter's start and
the text; both types see the same. Prints a JSON line per run: the loss on held-out text after each tenth of the steps,
computed in bfloat16 either way, and the step accuracies at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from eagle3.draft.batch import DraftBatch
from eagle3.draft.config import DraftConfig, RopeConfig, TTTSettings
from eagle3.draft.loss import TargetHead
from eagle3.draft.model import DraftModel
from eagle3.draft.ttt import TTTLoss, count_terms
from eagle3.draft.vocab import DraftVocab

PROMPT = 8
DOCUMENT = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=16, help=f"of {DOCUMENT} tokens, in a step")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=2e-4, help="peak learning rate")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    target = Target.make(args.hidden, args.vocab, torch.device(args.device))
    for seed in args.seeds:
        for float8 in (False, True):
            print(json.dumps(train(target, args, seed, float8)), flush=True)


@dataclass(frozen=True)
class Target:
    """V tokens, H hidden.

    Attributes:
        embedding: [V, H].
        mix: [2H, H], from the last two tokens' embeddings to the state.
        head: [V, H].
    """

    embedding: torch.Tensor
    mix: torch.Tensor
    head: torch.Tensor

    @classmethod
    def make(cls, hidden: int, vocab: int, device: torch.device) -> Target:
        generator = torch.Generator(device).manual_seed(0)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        return cls(
            randn(vocab, hidden), randn(2 * hidden, hidden) * (2 * hidden) ** -0.5, randn(vocab, hidden) / hidden**0.5
        )

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """[.., T, H] of ids [.., T]."""
        before = F.pad(ids, (1, 0))[..., :-1]
        pair = torch.cat([self.embedding[before], self.embedding[ids]], -1)
        return F.rms_norm(torch.tanh(pair @ self.mix), self.embedding.shape[1:])

    def batch(self, documents: int, generator: torch.Generator) -> DraftBatch:
        """One packed row of sampled text."""
        device, (vocab, hidden) = self.embedding.device, self.embedding.shape
        ids = torch.randint(0, vocab, (documents, 2), generator=generator, device=device)
        while ids.shape[1] < DOCUMENT:
            chances = (4 * self.states(ids[:, -2:])[:, -1] @ self.head.T).softmax(-1)
            ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], 1)
        states = self.states(ids)
        embedded = self.embedding[ids]
        layers = torch.stack([embedded, (embedded + states) / 2, states], -2)
        layers += 0.3 * torch.randn(layers.shape, generator=generator, device=device)
        place = torch.arange(DOCUMENT, device=device).expand(documents, -1)
        mask = place >= PROMPT
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return DraftBatch(
            input_ids=ids.view(1, -1),
            loss_mask=mask.reshape(1, -1),
            aux=layers.view(1, -1, 3 * hidden).to(dtype),
            last_hidden=4 * states[mask].to(dtype),
            document_ids=torch.arange(documents, device=device).repeat_interleave(DOCUMENT)[None],
            position_ids=place.reshape(1, -1),
            sample_ids=["made up"],
        )


def train(target: Target, args: argparse.Namespace, seed: int, float8: bool) -> dict[str, object]:
    device, (vocab, hidden) = target.embedding.device, target.embedding.shape
    config = DraftConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 256, 1), head_dim=64, vocab_size=vocab, draft_vocab_size=vocab, num_aux=3,
        target_hidden_size=hidden, rms_norm_eps=1e-5, max_position_embeddings=4096, rope=RopeConfig(rope_theta=10000.0),
    )  # fmt: skip
    model, draft_vocab = DraftModel(config), DraftVocab.full(vocab)
    model.init_weights(seed)
    model.init_from_target(target.embedding.cpu(), 4 * torch.ones(hidden), target.head.cpu(), draft_vocab)
    settings = TTTSettings(7, 0.8, float8=float8)
    module = TTTLoss(model, draft_vocab, settings).to(device)
    exact = TTTLoss(module.model, draft_vocab, replace(settings, float8=False)).to(device)
    head = TargetHead(
        target.head.to(torch.bfloat16 if device.type == "cuda" else torch.float32),
        torch.ones(hidden),
        1e-5,
        "post_norm",
    )
    parameters = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator(device)
    held_out = target.batch(args.documents, generator.manual_seed(10**6))
    generator.manual_seed(seed)
    losses, began = [], time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1, (step + 1) / (0.05 * args.steps)) * (1 - step / args.steps)
        loss, _ = run(module, target.batch(args.documents, generator), head)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) * 10 % args.steps < 10:
            with torch.no_grad():
                found, accuracy = run(exact, held_out, head)
            losses.append(round(float(found), 4))
    return {
        "hidden": hidden, "seed": seed, "float8": float8, "losses": losses, "step_accuracy": accuracy,
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def run(module: TTTLoss, batch: DraftBatch, head: TargetHead) -> tuple[torch.Tensor, list[float]]:
    kind = batch.input_ids.device.type
    with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
        counts = count_terms(batch, head, module.vocab, module.ttt)
        output = module(batch, counts, counts.in_vocab)
    return output.loss, [round(value, 4) for value in (output.correct / output.active.clamp(min=1)).tolist()]


if __name__ == "__main__":
    main()
