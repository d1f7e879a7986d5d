#!/usr/bin/env python3
"""Run the processes of a training, on one host or several: `python scripts/launch.py --help`."""

from mxtrain import cli
from mxtrain.launch.main import main

if __name__ == "__main__":
    cli.run("launch.py", main)
