#!/usr/bin/env python3
"""Export a trained network: `python scripts/export.py --help`."""

from mxtrain import cli
from mxtrain.inference.export import main

if __name__ == "__main__":
    cli.run("export.py", main)
