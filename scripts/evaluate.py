#!/usr/bin/env python3
"""Evaluate a trained network: `python scripts/evaluate.py --help`."""

from mxtrain import cli
from mxtrain.inference.evaluate import main

if __name__ == "__main__":
    cli.run("evaluate.py", main)
