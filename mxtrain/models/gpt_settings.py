"""The shape of a GPT; importable without mxnet."""

from dataclasses import dataclass

from mxtrain.errors import UserError


@dataclass
class GPTConfig:
    """The language model of --task lm. Its vocabulary comes with the data: bytes are 256 tokens."""

    layers: int = 4
    """Blocks of a language model."""
    heads: int = 4
    """Heads of attention in each block; --width must be a multiple of them."""
    width: int = 128
    """Length of the vector of a token; the hidden layer of each block is four times as wide."""
    context: int = 128
    """Tokens of a sequence: what is trained on at once, and the most that a language model sees."""
    dropout: float = 0.0
    """Share of a language model's activations that training sets to 0; for small data, of which there are many epochs,
    0.1 or 0.2 is usual."""
    tied: bool = False
    """Use the embedding of the tokens for the output, too, as GPT-2 does. Both places keep a copy, so that it saves no
    memory."""

    def __post_init__(self):
        for name in ("layers", "heads", "width", "context"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: must be 1 or more")
        if self.width % self.heads:
            raise UserError(f"--heads {self.heads}: must divide --width {self.width}; each head takes a part of it")
        if not 0 <= self.dropout < 1:
            raise UserError(f"--dropout {self.dropout}: must be from 0 to below 1")
