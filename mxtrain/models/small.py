"""Small networks of our own, for small images and for tests. All are chains, so each layer is a segment."""

from mxnet.gluon import nn


def digits(classes: int, channels: int = 1) -> nn.HybridSequential:
    """A small convolutional network for images of about 8x8. x: (batch, channels, height, width)."""
    net = nn.HybridSequential(prefix="digits_")
    with net.name_scope():
        _convolution(net, 32, channels)
        _convolution(net, 32, 32)
        net.add(nn.MaxPool2D(2))
        _convolution(net, 64, 32)
        net.add(nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(classes, in_units=64))
    return net


def lenet(classes: int, channels: int = 1) -> nn.HybridSequential:
    """LeNet-5 (LeCun et al., 1998) with ReLU and max pooling, for images of about 28x28."""
    net = nn.HybridSequential(prefix="lenet_")
    with net.name_scope():
        net.add(
            nn.Conv2D(6, 5, padding=2, activation="relu", in_channels=channels),
            nn.MaxPool2D(2),
            nn.Conv2D(16, 5, activation="relu", in_channels=6),
            nn.MaxPool2D(2),
            nn.Flatten(),
            nn.Dense(120, activation="relu"),
            nn.Dense(84, activation="relu", in_units=120),
            nn.Dense(classes, in_units=84),
        )
    return net


def mlp(classes: int, channels: int = 1) -> nn.HybridSequential:
    """Two hidden layers of 128, for samples of any shape: `channels` is not needed."""
    net = nn.HybridSequential(prefix="mlp_")
    with net.name_scope():
        net.add(
            nn.Flatten(),
            nn.Dense(128, activation="relu"),
            nn.Dense(128, activation="relu", in_units=128),
            nn.Dense(classes, in_units=128),
        )
    return net


def _convolution(net: nn.HybridSequential, out: int, in_channels: int) -> None:
    net.add(
        nn.Conv2D(out, 3, padding=1, use_bias=False, in_channels=in_channels),
        nn.BatchNorm(in_channels=out),
        nn.Activation("relu"),
    )
