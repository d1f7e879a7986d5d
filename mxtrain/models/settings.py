"""Settings of the network: which one, what it starts from, what stays as it is."""

import re
from dataclasses import dataclass, field
from typing import List, Optional

from mxtrain.errors import UserError


@dataclass
class ModelConfig:
    """The network and its starting weights."""

    model: Optional[str] = None
    """Network: a name of gluoncv's or Gluon's model zoo (resnet50_v1), digits, lenet, mlp; bag for texts; gpt for
    language; or module:function, which is called with classes=N (default: one that suits the data)."""
    pretrained: bool = False
    """Start from the zoo's own weights, which must be in --pretrained-root; a head for another number
    of classes starts anew."""
    pretrained_root: Optional[str] = None
    """Folder with the zoo's weights (default: $MXNET_HOME/models, else ~/.mxnet/models)."""
    init_from: Optional[str] = None
    """Parameter file of save_parameters() or export() to start from; what fits by name and shape is
    loaded."""
    freeze: List[str] = field(default_factory=list)
    """Regular expressions: a parameter whose name (features.0.weight) contains a match keeps its value."""
    zero_gamma: bool = False
    """Start every residual block as the identity: the gamma of its last normalization is 0."""

    def __post_init__(self):
        if self.model is not None and not self.model.strip():
            raise UserError("--model is empty: give the name of a network, or module:function")
        if self.pretrained and self.init_from is not None:
            raise UserError("--pretrained and --init-from both say what to start from: give one of them")
        if self.pretrained_root is not None and not self.pretrained:
            raise UserError("--pretrained-root has no effect without --pretrained")
        if self.zero_gamma and (self.pretrained or self.init_from is not None):
            raise UserError("--zero-gamma would overwrite what --pretrained or --init-from loads: give one")
        for pattern in self.freeze:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(f"--freeze {pattern}: not a regular expression ({error})") from None
