#!/usr/bin/env python3
"""Train a Gluon network: `python scripts/train.py --help`."""

from mxtrain import cli
from mxtrain.train.main import main

if __name__ == "__main__":
    cli.run("train.py", main)
