"""What is done with a trained network: evaluate.py, predict.py and export.py."""
