#!/usr/bin/env python3
"""Predict with a trained network: `python scripts/predict.py --help`."""

from mxtrain import cli
from mxtrain.inference.predict import main

if __name__ == "__main__":
    cli.run("predict.py", main)
