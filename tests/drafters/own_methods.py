"""Two methods as a user would add them: docs/new_drafter.md shows this file between its lines, and the tests run it."""

# The page shows what stands between this line and the next one like it.
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from fovea.decoding.tree import DraftTree, TreeBuilder
from fovea.drafters.base import Drafter, Scored, initialise
from fovea.drafters.config import DrafterConfig
from fovea.drafters.registry import register_drafter
from fovea.drafters.training_free import register_proposer


@dataclass(frozen=True)
class MlpConfig(DrafterConfig):
    width: int = 256  # of the perceptron


@register_drafter
class MlpDrafter(Drafter):
    """A perceptron over [embedding; state], without attention: it knows the last token and the state before it."""

    name = "mlp"
    config_type = MlpConfig
    cache_layers = 0

    def __init__(self, spec, config, head):
        super().__init__(spec, config, head)
        self.up = nn.Linear(2 * spec.hidden_size, config.width)
        self.down = nn.Linear(config.width, spec.hidden_size)
        initialise(self)

    def forward(self, embeds, states, rotation, attend, *, is_visual=None, carried=None):
        h = states + self.down(F.silu(self.up(torch.cat((embeds, states), dim=-1))))
        return h, h

    def score(self, h, depth, memory, root=None):
        return Scored(hat=h, raw=h, passed_on=h)


@dataclass(frozen=True)
class EchoConfig:
    draft_tokens: int = 4

    @property
    def most_tokens_per_round(self):
        return self.draft_tokens + 1


class EchoProposer:
    """Drafts what followed each token when the answer last had it."""

    def __init__(self, spec, config):
        self.max_drafts = config.draft_tokens

    def start(self, prefill):
        self.last, self.following = None, {}

    def commit(self, tokens, states):
        for token in tokens.tolist():
            self.following[self.last] = token
            self.last = token

    def propose(self) -> DraftTree:
        tree, token = TreeBuilder(self.last), self.last
        while len(tree) <= self.max_drafts and (token := self.following.get(token)) is not None:
            tree.add(token, len(tree) - 1)
        return tree.finish()


register_proposer("echo", EchoConfig, EchoProposer)
# The page shows what stands between this line and the one like it above.
