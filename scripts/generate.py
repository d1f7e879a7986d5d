#!/usr/bin/env python3
"""Let a language model go on with a text: `python scripts/generate.py --help`."""

from mxtrain import cli
from mxtrain.inference.generate import main

if __name__ == "__main__":
    cli.run("generate.py", main)
