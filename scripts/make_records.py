#!/usr/bin/env python3
"""Write a folder or a list of images to record files: `python scripts/make_records.py --help`."""

from mxtrain import cli
from mxtrain.data.make_records import main

if __name__ == "__main__":
    cli.run("make_records.py", main)
