#!/usr/bin/env python3
"""Read all samples of a training once, and tell what they are: `python scripts/check_data.py --help`."""

from mxtrain import cli
from mxtrain.data.check import main

if __name__ == "__main__":
    cli.run("check_data.py", main)
